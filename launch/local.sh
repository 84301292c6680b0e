#!/usr/bin/env bash
# launch/local.sh [--dry-run] [FLAG ...]
#
# Sets everything up (launch/setup.sh), then trains ResNet-50 on scikit-learn's handwritten digits with RANKS Horovod
# ranks on this machine, as flags/digits.flags describes it. You can append flags of the program, which take precedence:
#
#   launch/local.sh --epochs=3 --optimizer=sgd
#   RANKS=4 launch/local.sh --run_dir=runs/four
#
#   --dry-run   print the command, run nothing
#   RANKS       number of ranks (default: 2)
#
# All flags: python -m hybrid_imagenet.main --help. The script returns the exit code of the program: 0 success, 2 invalid
# flag, 75 stopped by a signal after saving (continue with hybrid-imagenet resume). Press Ctrl-C once to save and stop, three times
# to stop at once.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

dry_run=0 flags=()
for argument in "$@"; do
  case $argument in
    -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
    --dry[-_]run) dry_run=1 ;;
    *) flags+=("$argument") ;;
  esac
done
ranks=${RANKS:-2}
check_number "$ranks" RANKS 1024
host_names=(localhost) host_slots=("$ranks")
run_command "--flagfile=$root_dir/flags/digits.flags" "${flags[@]}"
if ((dry_run)); then
  print_command "${command[@]}"
  exit 0
fi
say "training ResNet-50 on handwritten digits with $ranks ranks on this machine"
"$launch_dir/setup.sh"
# shellcheck source=launch/env.sh
. "$launch_dir/env.sh"
exec "${command[@]}"
