# shellcheck shell=bash
# Functions that the scripts of this directory share. This file is sourced, never run.

launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root_dir=$(dirname "$launch_dir")
venv_dir=${HYBRID_IMAGENET_VENV:-$root_dir/.venv}
[[ $venv_dir == /* ]] || venv_dir=$PWD/$venv_dir
# shellcheck disable=SC2034  # for the scripts that source this file
cache_dir=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/hybrid_imagenet

EXIT_USAGE=2

say() { printf '%s\n' "$*" >&2; }

# die MESSAGE: prints one line and exits with code 1, because something is missing on the machine.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# usage_error MESSAGE: prints one line and exits with code 2, because the command line is wrong.
usage_error() {
  printf 'error: %s\n' "$*" >&2
  exit "$EXIT_USAGE"
}

# help_of FILE: prints the comment after the first line of a script.
help_of() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$1"; }

# pins FILE: prints constraints.txt or hashes.txt. If there is a file for the version in $TENSORFLOW, its pins replace the
# pins of the same names.
pins() {
  local version_pins=$launch_dir/tensorflow-${TENSORFLOW:-}.txt hashes=0
  [[ -e $version_pins ]] || { cat "$launch_dir/$1" && return; }
  [[ $1 != hashes.txt ]] || hashes=1
  awk -F == -v hashes=$hashes '/^#/ { next }
    NR == FNR { replaced[$1]; if (!hashes) sub(/ --hash=.*/, ""); print; next }
    !($1 in replaced)' "$version_pins" "$launch_dir/$1"
}

# pinned NAME: prints the pinned version of a package.
pinned() { pins constraints.txt | sed -n "s/^$1==\([^ ;]*\).*/\1/p" | head -n 1; }

# print_command WORD...: prints a command that can be pasted into a shell.
print_command() {
  local word line=()
  for word in "$@"; do
    # Quote only the words that need it, so that the others stay readable.
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      line+=("$word")
    else
      line+=("'${word//\'/\'\\\'\'}'")
    fi
  done
  printf '%s\n' "${line[*]}"
}

# check_path PATH NAME: rejects special characters. Open MPI and Horovod put paths into shell commands without quotes,
# where a blank would split them.
check_path() {
  [[ $1 =~ ^[A-Za-z0-9_@%+=:,./~-]+$ ]] ||
    die "Open MPI does not support the blank or special character in $2 '$1'. Use another directory."
}

# check_number TEXT NAME MAXIMUM: rejects everything but a whole number from 1 to MAXIMUM.
check_number() {
  if ! [[ $1 =~ ^[1-9][0-9]{0,5}$ ]] || (($1 > $3)); then
    usage_error "$2 '$1' is not valid. Use a whole number from 1 to $3."
  fi
}

# check_name TEXT NAME: rejects what cannot be a network device or adapter, such as shell characters.
check_name() {
  [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._:-]{0,30}$ ]] ||
    usage_error "$2 '$1' is not valid. Use the name of a network interface."
}

# parse_hosts DEFAULT_SLOTS SPEC...: sets host_names and host_slots from HOST, HOST:SLOTS and comma-separated lists.
parse_hosts() {
  local default=$1 spec name slots seen=,
  shift
  host_names=() host_slots=()
  local IFS=', '
  # A '*' must not be expanded to file names.
  set -f
  # shellcheck disable=SC2048,SC2086  # split at commas on purpose
  set -- $*
  set +f
  for spec in "$@"; do
    name=${spec%%:*} slots=$default
    [[ $spec == *:* ]] && slots=${spec#*:}
    [[ $name =~ ^[A-Za-z0-9]([A-Za-z0-9._-]{0,250}[A-Za-z0-9])?$ && ! $name =~ ^[0-9]+$ ]] ||
      usage_error "Host '$spec' is not valid. Use HOST or HOST:SLOTS (letters, digits, '.', '-', '_')."
    [[ $slots =~ ^[1-9][0-9]{0,3}$ ]] ||
      usage_error "Host '$spec' has no valid number of slots. Write a whole number from 1 to 9999 after ':'."
    [[ $seen != *",$name,"* ]] || usage_error "Host '$name' is named twice. Name it once, with its slots: $name:N"
    seen+="$name,"
    host_names+=("$name") host_slots+=("$slots")
  done
  ((${#host_names[@]})) || usage_error "The list of hosts is empty. Name at least one host."
}

# total_slots: prints the number of ranks on all hosts of parse_hosts.
total_slots() {
  local slots total=0
  for slots in "${host_slots[@]}"; do total=$((total + slots)); done
  printf '%s\n' "$total"
}

# hosts_argument: prints host_names and host_slots as horovodrun -H takes them.
hosts_argument() {
  local i list=()
  for i in "${!host_names[@]}"; do list+=("${host_names[i]}:${host_slots[i]}"); done
  local IFS=,
  printf '%s\n' "${list[*]}"
}

# run_command PROGRAM_FLAG...: sets command to the words that train on the hosts of parse_hosts.
# shellcheck disable=SC2034
run_command() {
  command=("$venv_dir/bin/python" -m hybrid_imagenet run -np "$(total_slots)" -H "$(hosts_argument)" -- "$@")
}

# is_local HOST: succeeds if ranks on HOST start without ssh.
is_local() { [[ $1 == localhost || $1 == 127.* || $1 == "$(hostname)" ]]; }

# supervise COMMAND...: becomes the process that runs a launcher (mpirun, or horovodrun, which becomes mpirun). It passes
# signals on to the ranks, ends the launcher when they have ended, and returns their exit code.
supervise() { exec "$venv_dir/bin/python" -m hybrid_imagenet.resilience.supervisor -- "$@"; }
