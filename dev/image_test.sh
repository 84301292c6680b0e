#!/usr/bin/env bash
# dev/image_test.sh [--dir=DIR] [--keep] [PART ...]
#
# Builds and runs both targets of the Dockerfile on a machine without a container engine, and builds Horovod with other
# compilers. It uses Debian's buildah, and base images that debootstrap creates. Each PART (default: all) prints one line
# with its result; the exit code is 0 if all of them pass.
#
#   cpu     builds the CPU image, and trains with two ranks as its user            (Debian bookworm: GCC 12)
#   gpu     builds the GPU image; Horovod with NCCL must load with the libraries of the wheels, and training must end
#           with one line, because there is no driver                              (Debian trixie: GCC 13, CUDA 12.4)
#   gcc-13  runs launch/setup.sh --cpu with this compiler, and trains with two ranks (Debian trixie)
#   gcc-14  the same
#
#   --dir=DIR  working directory; needs 30 GB (default: /var/tmp/hybrid_imagenet_images)
#   --keep     keep the working directory; the next run uses it again
#
# The base images replace those of the Dockerfile, which no package mirror has. That of the GPU image has GCC 13, as Ubuntu
# 24.04, but Python 3.11 and an older CUDA 12. The script needs root, buildah, debootstrap, Debian's mirrors and PyPI, and
# takes about an hour on two cores. Run it after a change of the Dockerfile, launch/setup.sh, launch/horovod_wheel.sh,
# launch/patch_horovod.py or launch/constraints.txt.
#
#   DEBIAN_MIRROR   mirror of Debian (default: http://deb.debian.org/debian)
#   PIP_CERT        file of certificates for pip, under /etc/ssl/certs
#   STORAGE_DRIVER  driver of buildah (default: overlay if the kernel has it, else vfs, which copies complete images)
# shellcheck disable=SC2329  # quiet and a trap call functions by name
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

ALL_PARTS=(cpu gpu gcc-13 gcc-14)
FREE_GB=30
USER_OF_IMAGE=1000
# A network and a dataset so small that two epochs take seconds.
TINY=(--model=resnet8 --model_width=4 --image_size=8 --epochs=2 --warmup_epochs=1 --target_top1=0 --run_dir=runs/tiny)
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

main() {
  local dir=/var/tmp/hybrid_imagenet_images keep=0 parts=() argument part
  while (($#)); do
    argument=$1
    case $argument in
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      --dir=?*) dir=${argument#*=} ;;
      --keep) keep=1 ;;
      cpu | gpu | gcc-13 | gcc-14) parts+=("$argument") ;;
      *) usage_error "Unknown option or part $argument. See dev/image_test.sh --help." ;;
    esac
    shift
  done
  ((${#parts[@]})) || parts=("${ALL_PARTS[@]}")
  (($(id -u) == 0)) || die "Only root can create base images. Run the script with sudo."
  for argument in buildah debootstrap; do
    command -v "$argument" >/dev/null || die "$argument was not found. Install it (Debian: apt install $argument)."
  done
  mkdir -p "$dir" || die "Cannot write to $dir. Set --dir to another directory."
  work=$(cd "$dir" && pwd -P)
  check_path "$work" "the directory of --dir"
  local free
  free=$(df -Pk "$work" | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= FREE_GB)) || die "$work has $free GB free, but the images need $FREE_GB GB. Free some space, or set --dir."
  storage_driver=${STORAGE_DRIVER:-$(grep -qw overlay /proc/filesystems && echo overlay || echo vfs)}
  export BUILDAH_ISOLATION=chroot TMPDIR=$work/tmp
  mkdir -p "$work/trees" "$work/logs" "$TMPDIR"
  ((keep)) || trap remove_all EXIT
  certificates
  local failed=()
  for part in "${parts[@]}"; do
    log_file=$work/logs/$part.log
    : >"$log_file"
    # Run it in the background, because set -e has no effect in a function that is part of a condition.
    case $part in
      cpu) test_cpu & ;;
      gpu) test_gpu & ;;
      gcc-*) test_compiler "${part#gcc-}" & ;;
    esac
    wait $! || { keep_log "$part" && failed+=("$part"); }
  done
  ((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
}

# keep_log PART: prints the end of the log, and keeps it when everything else is removed.
keep_log() {
  cp "$log_file" "/var/tmp/hybrid_imagenet_image_test_$1.log"
  tail -n 5 "$log_file" >&2
  say "$1: failed (complete log: /var/tmp/hybrid_imagenet_image_test_$1.log)"
}

build_tool() { command buildah --root "$work/storage" --runroot "$work/run" --storage-driver "$storage_driver" "$@"; }

remove_all() {
  build_tool rm --all >/dev/null 2>&1 || true
  build_tool rmi --all --force >/dev/null 2>&1 || true
  rm -rf --one-file-system "$work"/{trees,logs,tmp,storage,run,cuda_packages,pip.conf}
  rmdir "$work" 2>/dev/null || true
}

# certificates: sets mounts to the files that pip needs in a container if the mirrors have their own certificates.
certificates() {
  mounts=()
  [[ -n ${PIP_CERT:-} ]] || return 0
  printf '[global]\ncert = %s\n' "$PIP_CERT" >"$work/pip.conf"
  mounts=(--volume "$work/pip.conf:/etc/pip.conf:ro" --volume /etc/ssl/certs:/etc/ssl/certs:ro)
}

# quiet TITLE COMMAND...: runs a command, prints one line, and writes its output to the log of the part.
quiet() {
  local title=$1 start=$SECONDS
  shift
  printf '%s ... ' "$title" >&2
  printf '\n== %s\n' "$title" >>"$log_file"
  "$@" >>"$log_file" 2>&1 </dev/null & # see main
  wait $! || { printf 'failed\n' >&2 && return 1; }
  printf '%d s\n' $((SECONDS - start)) >&2
}

# tree SUITE PACKAGES: creates a minimal Debian in trees/SUITE.
tree() {
  [[ ! -e $work/trees/$1.made ]] || return 0
  rm -rf "$work/trees/$1"
  debootstrap --variant=minbase --include="$2" "$1" "$work/trees/$1" "$mirror"
  touch "$work/trees/$1.made"
}

# python_of_bookworm: lets the tree of trixie, whose Python is 3.13, install Python from bookworm, here and in the
# Dockerfile.
python_of_bookworm() {
  local root=$work/trees/trixie
  [[ ! -e $root/usr/bin/python3.11 ]] || return 0
  echo "deb $mirror bookworm main" >"$root/etc/apt/sources.list.d/bookworm.list"
  printf '%s\n' 'Package: python3 python3-minimal python3-venv python3-distutils python3-lib2to3 libpython3-stdlib' \
    'Pin: release n=bookworm' 'Pin-Priority: 1001' >"$root/etc/apt/preferences.d/python"
  chroot "$root" apt-get update
  chroot "$root" apt-get install -y --no-install-recommends python3 python3-venv
}

# cuda_toolkit: copies the files of Debian's CUDA 12.4 that nvcc needs to trees/cuda, in the layout of /usr/local/cuda.
cuda_toolkit() {
  local package root=$work/trees/trixie packages=$work/cuda_packages cuda=$work/trees/cuda lib=usr/lib/x86_64-linux-gnu
  [[ ! -e $cuda/bin/nvcc ]] || return 0
  rm -rf "$packages" "$cuda" && mkdir -p "$packages" "$cuda"/{lib64,nvvm,bin}
  echo "deb $mirror trixie non-free" >"$root/etc/apt/sources.list.d/non-free.list"
  chroot "$root" apt-get update
  chroot "$root" sh -c 'cd /tmp && apt-get download nvidia-cuda-toolkit nvidia-cuda-dev libcudart12 libcu++-dev'
  mv "$root"/tmp/*.deb "$packages"
  rm "$root/etc/apt/sources.list.d/non-free.list"
  for package in "$packages"/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$packages" --wildcards --exclude='*/compute-sanitizer*' \
      './usr/bin/*' ./usr/lib/nvidia-cuda-toolkit './usr/include/*' "./$lib/libcudart*" "./$lib/libcudadevrt*" \
      "./$lib/libculibos*" "./$lib/stubs/*" 2>/dev/null || true # no package has all of these files
  done
  cp -a "$packages"/usr/include "$cuda/"
  # trixie's C library declares these functions too, with noexcept. The declarations must agree.
  sed -i -E 's/((sin|cos)pif?\((double|float) x\));/\1 noexcept(true);/' "$cuda/include/crt/math_functions.h"
  cp -aL "$packages/$lib"/libcudart{.so,_static.a} "$packages/$lib"/libcudadevrt.a "$packages/$lib"/libculibos.a \
    "$packages/$lib"/stubs "$cuda/lib64/"
  # This is a script that runs the nvcc that is copied below.
  rm "$packages"/usr/bin/nvcc
  cp -a "$packages"/usr/bin/* "$cuda/bin/"
  cp -a "$packages"/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,cicc,crt} "$cuda/bin/"
  cp -a "$packages"/usr/lib/nvidia-cuda-toolkit/libdevice "$cuda/nvvm/"
  cat >"$cuda/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
CICC_PATH = $(_HERE_)
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
PROFILE
  rm -rf "$packages"
}

# base NAME DIRECTORY:TARGET...: creates an image of these directories, unless it exists.
base() {
  local name=$1 container pair
  shift
  ! build_tool inspect --type image "$name" >/dev/null 2>&1 || return 0
  container=$(build_tool from scratch)
  for pair in "$@"; do build_tool add --quiet "$container" "$work/trees/${pair%%:*}" "${pair#*:}"; done
  build_tool config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd /bin/bash "$container"
  build_tool commit --rm --quiet "$container" "$name"
}

# compiler N FROM NAME: creates an image with GCC N under all names of the compiler, even if another one is installed later.
compiler() {
  local container
  ! build_tool inspect --type image "$3" >/dev/null 2>&1 || return 0
  container=$(build_tool from "$2")
  # shellcheck disable=SC2016  # the shell in the container expands it
  build_tool run "$container" -- sh -ec 'apt-get update && apt-get install -y --no-install-recommends g++-$1
    for name in gcc g++; do ln -sf /usr/bin/$name-$1 /usr/local/bin/$name; done
    ln -sf gcc /usr/local/bin/cc && ln -sf g++ /usr/local/bin/c++' sh "$1"
  build_tool commit --rm --quiet "$container" "$3"
}

# image TARGET ARGUMENT...: builds a target of the Dockerfile.
image() {
  local target=$1
  shift
  build_tool build --layers=false --format docker --target "$target" --tag "hybrid-imagenet:$target" "${mounts[@]}" "$@" "$root_dir"
}

# inside CONTAINER COMMAND...: runs a command as the user of the image, in its working directory.
inside() {
  local container=$1
  shift
  build_tool run --user "$USER_OF_IMAGE" --env HOME=/home/mpiuser "$container" -- "$@"
}

# trains CONTAINER: trains two epochs on two ranks. Prints the compiler of the image and the result of the training.
trains() {
  inside "$1" local.sh "${TINY[@]}"
  built_by "$1"
  inside "$1" python3 -c 'import json, os
with open("runs/tiny/summary.json") as file:
    print("result: user", os.getuid(), json.load(file))'
}

# built_by CONTAINER: prints the compiler that Horovod's library names.
built_by() {
  inside "$1" python3 -c 'import pathlib, re, sys
(library,) = pathlib.Path("/opt/venv").glob("lib/python*/site-packages/horovod/tensorflow/mpi_lib*.so")
names = sorted(set(re.findall(rb"GCC: [ -~]+", library.read_bytes())))
print("result: Horovod built by", *(name.decode() for name in names), "for Python", sys.version.split()[0])'
}

# results PART: prints the results in the log.
results() { sed -n "s/^result: /$1: /p" "$log_file"; }

test_cpu() {
  local container
  quiet "cpu: Debian bookworm" tree bookworm ca-certificates,python3,python3-venv
  quiet "cpu: base image" base localhost/debian:bookworm bookworm:/
  quiet "cpu: building the image" image cpu --build-arg DEBIAN=localhost/debian:bookworm
  container=$(build_tool from localhost/hybrid-imagenet:cpu)
  quiet "cpu: training two ranks" trains "$container"
  results cpu
}

# The image that replaces CUDA's has nvcc, a compiler that nvcc supports, and Python. The one that replaces Ubuntu's has the
# same Python.
test_gpu() {
  local container
  quiet "gpu: Debian trixie" tree trixie ca-certificates
  quiet "gpu: Python 3.11" python_of_bookworm
  quiet "gpu: CUDA's compiler" cuda_toolkit
  quiet "gpu: base images" gpu_bases
  quiet "gpu: building the image" image gpu --build-arg CUDA=localhost/debian:cuda \
    --build-arg UBUNTU=localhost/debian:trixie
  container=$(build_tool from localhost/hybrid-imagenet:gpu)
  quiet "gpu: loading Horovod" loads_with_nccl "$container"
  quiet "gpu: training without a driver" fails_without_driver "$container"
  results gpu
}

gpu_bases() {
  base localhost/debian:trixie trixie:/
  base localhost/debian:nvcc trixie:/ cuda:/usr/local/cuda
  # nvcc of CUDA 12.4 does not support a newer compiler.
  compiler 13 localhost/debian:nvcc localhost/debian:cuda
}

# loads_with_nccl CONTAINER: checks that Horovod's library loads, has NCCL and uses CUDA's libraries of the wheels.
loads_with_nccl() {
  built_by "$1"
  inside "$1" bash -ec '. /opt/hybrid_imagenet/launch/env.sh; python -c "
import horovod.tensorflow as hvd, pathlib, re
assert hvd.nccl_built() and hvd.mpi_built()
maps = pathlib.Path(\"/proc/self/maps\").read_text()
loaded = sorted(set(re.findall(r\"/\S*/lib(?:nccl|cudart|cudnn|cublas)\.so\S*\", maps)))
assert loaded and all(\"/site-packages/nvidia/\" in path for path in loaded), loaded
print(\"result: NCCL\", hvd.nccl_built(), *loaded)"'
}

# fails_without_driver CONTAINER: checks that training without a driver ends with one line and code 2, and that it runs on
# the CPU if the user asks for it.
fails_without_driver() {
  local code=0 lines
  lines=$(inside "$1" local.sh "${TINY[@]}" 2>&1) || code=$?
  printf '%s\nexit code %d\n' "$lines" "$code"
  lines=$(grep '^error: ' <<<"$lines")
  [[ $code == 2 && $lines == *driver* && $lines != *$'\n'* ]]
  printf 'result: exit code %d, %s\n' "$code" "$lines"
  inside "$1" env CUDA_VISIBLE_DEVICES= local.sh "${TINY[@]}"
}

# test_compiler N: creates an environment with GCC N, without the Dockerfile.
test_compiler() {
  local container
  quiet "gcc-$1: Debian trixie" tree trixie ca-certificates
  quiet "gcc-$1: Python 3.11" python_of_bookworm
  quiet "gcc-$1: the compiler" compiler_base "$1"
  container=$(build_tool from "localhost/debian:gcc-$1")
  quiet "gcc-$1: launch/setup.sh" sets_up "$container"
  quiet "gcc-$1: training two ranks" trains "$container"
  results "gcc-$1"
  build_tool rm "$container" >/dev/null
}

compiler_base() {
  base localhost/debian:trixie trixie:/
  compiler "$1" localhost/debian:trixie "localhost/debian:gcc-$1"
}

# sets_up CONTAINER: runs the steps of the Dockerfile in the container.
sets_up() {
  local name
  for name in flags hybrid_imagenet launch pyproject.toml setup.py README.md LICENSE NOTICE; do
    build_tool copy --quiet "$1" "$root_dir/$name" "/opt/hybrid_imagenet/$name"
  done
  build_tool run "$1" -- sh -c 'apt-get install -y --no-install-recommends make openssh-client'
  build_tool config --env HYBRID_IMAGENET_VENV=/opt/venv --env OMPI_MCA_btl_vader_single_copy_mechanism=none \
    --env PIP_NO_CACHE_DIR=1 --env PATH=/opt/hybrid_imagenet/launch:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    --workingdir /workspace "$1"
  build_tool run "${mounts[@]}" "$1" -- /opt/hybrid_imagenet/launch/setup.sh --cpu
  build_tool run "$1" -- /opt/hybrid_imagenet/launch/container_user.sh
}

# Keep this on one line, because bash continues to read the file, which may have changed meanwhile.
main "$@"; exit
