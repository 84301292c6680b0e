#!/usr/bin/env bash
# launch/kubernetes/launcher.sh [--dry-run] FLAG ...
#
# What the launcher of mpijob.yaml runs: one rank for each slot of the hosts that the MPI operator lists. An eviction (TERM)
# makes all ranks save and stop; a restarted launcher continues in its --run_dir.
#
#   MPI_HOSTFILE   list of hosts (/etc/mpi/hostfile), one "NAME slots=N" per line
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
((has_run_dir)) || usage_error "no --run_dir: a restarted launcher could not find its results"
hostfile=${MPI_HOSTFILE:-/etc/mpi/hostfile}
[[ -r $hostfile ]] || usage_error "$hostfile: no such file; this script runs in the launcher of an MPIJob"
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
