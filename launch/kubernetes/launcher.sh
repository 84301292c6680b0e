#!/usr/bin/env bash
# launch/kubernetes/launcher.sh [--dry-run] FLAG ...
#
# The main process of the launcher in mpijob.yaml. It starts one rank for each slot of the hosts that the MPI operator
# lists. After an eviction (TERM) all ranks save and stop; a restarted launcher continues in its --run_dir.
#
#   MPI_HOSTFILE   file with one "NAME slots=N" per line (default: /etc/mpi/hostfile)
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

dry_run=0 flags=() has_run_dir=0
for argument in "$@"; do
  case $argument in
    -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
    --dry-run) dry_run=1 && continue ;;
    --run[_-]dir | --run[_-]dir=*) has_run_dir=1 ;;
  esac
  flags+=("$argument")
done
((has_run_dir)) || usage_error "--run_dir is missing. Set it, because a restarted launcher must find its results."
hostfile=${MPI_HOSTFILE:-/etc/mpi/hostfile}
[[ -r $hostfile ]] || usage_error "$hostfile was not found. Run this script in the launcher of an MPIJob."
mapfile -t lines < <(sed -e 's/#.*//' -e 's/[[:space:]]*slots=/:/' -e '/^[[:space:]]*$/d' "$hostfile")
parse_hosts 1 "${lines[@]}"
run_command "${flags[@]}" --resume
if ((dry_run)); then
  print_command "${command[@]}"
  exit 0
fi
# shellcheck source=launch/env.sh
. "$launch_dir/env.sh"
exec "${command[@]}"
