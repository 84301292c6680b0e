#!/usr/bin/env bash
# dev/cudnn_probe.sh [--packages=DIR] [--out=DIR] [--compile-only] [--dry-run] [ARGUMENT ...]
#
# Times cuDNN's fused engines for the convolutions of ResNet-50 on one GPU, next to the kernels that a step runs today. The
# last line says whether a custom operation with these engines is worth its upkeep. It needs g++, but no nvcc.
#
#   --packages=DIR  directory of NVIDIA's Python packages (default: that of the environment)
#   --out=DIR       directory of the program and the table (default: cudnn-probe)
#   --compile-only  compile, and check the graphs of all patterns, which needs no GPU
#   --dry-run       print the layers and the command of the compiler, and run nothing
#   ARGUMENT        --batch=256, --runs=20 (for each time) or --plans=4 (of cuDNN, the fastest of which counts)
#
# Two packages with headers are not in the environment. A directory with all that is needed (2 GB):
#
#   pip install --no-deps --target=cudnn -c launch/constraints.txt nvidia-cudnn-frontend==1.32.0 \
#     nvidia-cuda-cccl-cu12==12.9.27 nvidia-cudnn-cu12 nvidia-cublas-cu12 \
#     nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12 nvidia-cuda-nvrtc-cu12
#   dev/cudnn_probe.sh --packages=cudnn
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

main() {
  local packages='' out=cudnn-probe compile_only='' dry_run='' argument
  local arguments=()
  for argument in "$@"; do
    case $argument in
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      --packages=*) packages=${argument#*=} ;;
      --out=*) out=${argument#*=} ;;
      --compile[-_]only) compile_only=1 ;;
      --dry[-_]run) dry_run=1 ;;
      --batch=* | --runs=* | --plans=*)
        check_number "${argument#*=}" "${argument%%=*}" 4096
        arguments+=("$argument")
        ;;
      *) usage_error "Unknown option $argument. See dev/cudnn_probe.sh --help." ;;
    esac
  done
  [[ -n $packages ]] || packages=$(site_packages)
  local source=$root_dir/dev/cudnn_probe
  local name include=(-isystem "$packages/include") library=() path=''
  for name in cudnn cuda_runtime cuda_nvcc cuda_cccl cuda_nvrtc; do
    include+=(-isystem "$packages/nvidia/$name/include")
  done
  for name in cudnn cuda_runtime cuda_nvrtc; do
    library+=("-L$packages/nvidia/$name/lib")
  done
  for name in cudnn cublas cuda_runtime cuda_nvrtc; do
    path+=$packages/nvidia/$name/lib:
  done
  # cuDNN's headers use the compiler for device code at runtime, NVRTC.
  library+=(-l:libcudnn.so.9 -l:libcudart.so.12 -l:libnvrtc.so.12 -ldl)
  local compile=("${CXX:-g++}" -std=c++17 -O1 -o "$out/cudnn_probe" "$source/probe.cc" "${include[@]}" "${library[@]}")
  if [[ -n $dry_run ]]; then
    cat "$source/resnet50.txt"
    printf '\n%s\n' "${compile[*]}"
    exit
  fi
  check_headers "$packages"
  mkdir -p "$out"
  # Compiling takes a minute or more, so a program that is newer than its source is used again.
  [[ $out/cudnn_probe -nt $source/probe.cc ]] || "${compile[@]}"
  [[ -z $compile_only ]] || arguments+=(--dry-run)
  export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:-}
  "$out/cudnn_probe" "$source/resnet50.txt" "${arguments[@]}" | tee "$out/cudnn_probe.txt"
}

# site_packages: prints the directory of the packages of the environment.
site_packages() {
  local directories=("$venv_dir"/lib/python3*/site-packages)
  printf '%s' "${directories[0]}"
}

# check_headers DIR: ends the program if a package is missing in a directory.
check_headers() {
  local header
  for header in include/cudnn_frontend.h nvidia/{cudnn/include/cudnn,cuda_runtime/include/cuda_runtime_api}.h \
    nvidia/cuda_nvcc/include/crt/host_defines.h nvidia/cuda_cccl/include/nv/target nvidia/cuda_nvrtc/include/nvrtc.h; do
    [[ -e $1/$header ]] || die "$1/$header is missing. See dev/cudnn_probe.sh --help for the packages to install."
  done
}

# Keep this on one line, because bash continues to read the file, which may have changed meanwhile.
main "$@"; exit
