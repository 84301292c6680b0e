#!/usr/bin/env bash
# launch/local.sh [--dry-run] [FLAG ...]
#
# Sets everything up (launch/setup.sh), then trains ResNet-50 on scikit-learn's handwritten digits with RANKS Horovod
# ranks on this machine: the run that flags/digits.flags describes. Flags of the program can be appended and win:
#
#   launch/local.sh --epochs=3 --optimizer=sgd
#   RANKS=4 launch/local.sh --run_dir=runs/four
#
#   --dry-run   print the command, run nothing
#   RANKS       number of ranks (2)
#
# All flags: python -m hybrid_imagenet.main --help. The exit code is the program's: 0 good, 2 a flag that cannot be
# used, 75 stopped by a signal after saving (start again with --resume). Ctrl-C once saves and stops; the third stops now.
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
