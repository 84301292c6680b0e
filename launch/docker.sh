#!/usr/bin/env bash
# launch/docker.sh [--gpu] [--build] [--data=DIR] [--runs=DIR] [--dry-run] [COMMAND [ARGUMENT ...]]
#
# Runs a command of this directory in a container. The image is built from the Dockerfile if it does not exist.
#
#   launch/docker.sh local.sh --epochs=3
#   launch/docker.sh --gpu --data=/data/imagenet cluster1.sh localhost:8 --data_dir=/data
#
#   --gpu       the GPU image, with all GPUs and RDMA adapters of this host (needs the NVIDIA container toolkit)
#   --build     build the image again
#   --data=DIR  mount DIR at /data, read-only
#   --runs=DIR  mount DIR at /workspace/runs, for results (default: runs in the current directory)
#   --dry-run   print the commands, run nothing
#   INFINIBAND  directory with the devices of RDMA adapters (default: /dev/infiniband)
#   DOCKER      the container engine (default: docker; podman takes the same arguments)
#
# The command (default: local.sh) and its exit code are the same as outside a container.
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
    -*) usage_error "Unknown option $1. Flags of the program come after the command (see launch/docker.sh --help)." ;;
    *) break ;;
  esac
  shift
done
(($#)) || set -- local.sh

# Docker splits the arguments of --mount and --volume at commas and colons.
for directory in "$data" "$runs"; do
  [[ $directory != *[,:]* ]] ||
    usage_error "$engine cannot mount '$directory', because it contains ',' or ':'. Use another directory."
done
[[ -z $data || -d $data ]] || usage_error "--data=$data was not found. Use an existing directory."

image=hybrid-imagenet:$target
build_command=("$engine" build --target "$target" -t "$image" "$root_dir")
# Results belong to the user who has started the script. Open MPI and NCCL communicate through shared memory, for which
# the default of 64 MB is too small. RDMA needs locked memory.
run_command=("$engine" run --rm --init --shm-size=2g --ulimit memlock=-1 --stop-timeout=60
  --user "$(id -u):$(id -g)" --env HOME=/tmp --volume "$(realpath -m "$runs"):/workspace/runs")
# Without root, podman would map the user to another one.
if [[ ${engine##*/} == podman && $(id -u) != 0 ]]; then run_command+=(--userns=keep-id); fi
if [[ -t 0 && -t 1 ]]; then run_command+=(--interactive --tty); fi
[[ -z $data ]] || run_command+=(--volume "$(realpath "$data"):/data:ro")
if [[ $target == gpu ]]; then
  # CUDA compiles code for a GPU at its first use. Keep it next to the results, because the container is removed.
  run_command+=(--gpus all --network host --env CUDA_CACHE_PATH=/workspace/runs/.cuda_cache)
  # --gpus does not pass RDMA adapters.
  [[ ! -e $infiniband ]] || run_command+=(--device "$infiniband")
fi
run_command+=("$image" "$@")

if ((dry_run)); then
  print_command "${build_command[@]}"
  print_command "${run_command[@]}"
  exit 0
fi
command -v "$engine" >/dev/null || die "$engine was not found. Install Docker, or set DOCKER to another engine."
mkdir -p "$runs" || die "Cannot write to $runs. Set --runs to another directory."
if ((build)) || ! "$engine" image inspect "$image" >/dev/null 2>&1; then
  "${build_command[@]}" || die "The image could not be built (see above)."
fi
exec "${run_command[@]}"
