#!/usr/bin/env bash
# dev/gpu_speed.sh [--minutes=N] [--peer_python=PATH] [--out=DIR] [--rehearse] [--dry-run]
#
# Times each form of the training step on one GPU, alone and together, and JAX with the whole recipe on the same card, all
# at the commit of this checkout. It is meant for a machine that is lent for some minutes: the arms of most value come
# first, the table in DIR is written after each of them, and the same command continues with those that are missing. That
# includes JAX if the interpreter did not have it before.
#
# One GPU needs neither Horovod nor nvcc, so this environment is enough:
#   python3 -m venv .venv && .venv/bin/pip install -c launch/constraints.txt '.[gpu]'
#
#   --minutes=N         end after N minutes (default: 8)
#   --peer_python=PATH  interpreter that has JAX, a path or a name on the PATH (default: python3 outside the environment)
#   --out=DIR           directory of the table and the logs (default: gpu-speed)
#   --rehearse          try the arms on a small network where there is no GPU
#   --dry-run           print the commands and run nothing
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

main() {
  local minutes=8 peer_python=python3 out=gpu-speed rehearse='' dry_run='' argument
  for argument in "$@"; do
    case $argument in
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      --minutes=*) minutes=${argument#*=} ;;
      --peer[-_]python=*) peer_python=${argument#*=} ;;
      --out=*) out=${argument#*=} ;;
      --rehearse) rehearse=1 ;;
      --dry[-_]run) dry_run=1 ;;
      *) usage_error "Unknown option $argument. See dev/gpu_speed.sh --help." ;;
    esac
  done
  check_number "$minutes" --minutes 600
  # env.sh puts the environment first on the PATH, and its Python does not have JAX.
  local path=:$PATH: peer_path
  path=${path//:"$venv_dir/bin":/:}
  peer_path=$(PATH=${path:1:-1} command -v "$peer_python") || usage_error "--peer_python=$peer_python was not found."
  local arms=(python -m benchmarks arms --only=speed "--minutes=$minutes" "--peer_python=$peer_path" "--out=$out")
  if [[ -n $rehearse ]]; then
    arms+=(--rehearse --steps=1 --rounds=1)
  fi
  if [[ -n $dry_run ]]; then
    printf 'cd %s && . launch/env.sh\n%s\n' "$root_dir" "${arms[*]}"
    exit
  fi
  [[ -x $venv_dir/bin/python ]] || die "There is no environment at $venv_dir. Run launch/setup.sh first."
  mkdir -p "$out"
  # Clocks and temperature explain differences between two runs.
  nvidia-smi -q -d CLOCK,POWER,TEMPERATURE >"$out/nvidia-smi.txt" 2>&1 || true
  # shellcheck source=launch/env.sh
  . "$launch_dir/env.sh"
  export PYTHONPATH=$root_dir${PYTHONPATH:+:$PYTHONPATH}
  exec "${arms[@]}"
}

# Keep this on one line, because bash continues to read the file, which may have changed meanwhile.
main "$@"; exit
