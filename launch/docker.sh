#!/usr/bin/env bash
# launch/docker.sh [--gpu] [--build] [--data=DIR] [--runs=DIR] [--dry-run] [COMMAND [ARGUMENT ...]]
#
# Runs a command of this directory in a container; the image is built from the Dockerfile when it is missing.
#
#   launch/docker.sh local.sh --epochs=3
#   launch/docker.sh --gpu --data=/data/imagenet cluster1.sh localhost:8 --data_dir=/data
#
#   --gpu       the GPU image, with all GPUs and RDMA adapters of this host (needs the NVIDIA container toolkit)
#   --build     build the image again
#   --data=DIR  shown to the container at /data, read-only
#   --runs=DIR  where results go, /workspace/runs in the container (runs in the current directory)
#   --dry-run   print the commands, run nothing
#   INFINIBAND  where the devices of RDMA adapters are (/dev/infiniband)
#   DOCKER      the container engine (docker; podman takes the same arguments)
#
# The command (local.sh without one) and its exit code are as outside a container.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

infiniband=${INFINIBAND:-/dev/infiniband}
target=cpu build=0 dry_run=0 data='' runs=$PWD/runs engine=${DOCKER:-docker}
while (($#)); do
  case $1 in
    -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
    --gpu) target=gpu ;;
    --build) build=1 ;;
    --dry[-_]run) dry_run=1 ;;
    --data=*) data=${1#*=} ;;
    --runs=*) runs=${1#*=} ;;
    --) shift && break ;;
    -*) usage_error "$1: unknown option; flags of the program come after the command (see launch/docker.sh --help)" ;;
    *) break ;;
  esac
  shift
done
(($#)) || set -- local.sh

# --mount and -v split at commas and colons.
for directory in "$data" "$runs"; do
  [[ $directory != *[,:]* ]] || usage_error "directory '$directory': holds ',' or ':', which $engine cannot mount"
done
[[ -z $data || -d $data ]] || usage_error "--data=$data: no such directory"

image=hybrid-imagenet:$target
build_command=("$engine" build --target "$target" -t "$image" "$root_dir")
# Results belong to who started this. Open MPI and NCCL talk through shared memory, of which the default is 64 MB; RDMA
# needs locked memory.
run_command=("$engine" run --rm --init --shm-size=2g --ulimit memlock=-1 --stop-timeout=60
  --user "$(id -u):$(id -g)" --env HOME=/tmp --volume "$(realpath -m "$runs"):/workspace/runs")
# podman without root maps the user to another one unless told to keep it.
if [[ ${engine##*/} == podman && $(id -u) != 0 ]]; then run_command+=(--userns=keep-id); fi
if [[ -t 0 && -t 1 ]]; then run_command+=(--interactive --tty); fi
[[ -z $data ]] || run_command+=(--volume "$(realpath "$data"):/data:ro")
if [[ $target == gpu ]]; then
  # What CUDA compiles for a GPU at its first use is kept beside the results, not lost with the container.
  run_command+=(--gpus all --network host --env CUDA_CACHE_PATH=/workspace/runs/.cuda_cache)
  # RDMA adapters, of which --gpus passes none.
  [[ ! -e $infiniband ]] || run_command+=(--device "$infiniband")
fi
run_command+=("$image" "$@")

if ((dry_run)); then
  print_command "${build_command[@]}"
  print_command "${run_command[@]}"
  exit 0
fi
command -v "$engine" >/dev/null || die "$engine is missing: install Docker, or name another engine in DOCKER"
mkdir -p "$runs" || die "cannot write to $runs: give another --runs"
if ((build)) || ! "$engine" image inspect "$image" >/dev/null 2>&1; then
  "${build_command[@]}" || die "the image could not be built (see above)"
fi
exec "${run_command[@]}"
