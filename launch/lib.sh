# shellcheck shell=bash
# Functions that the scripts of this directory share. Sourced, never run.

launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root_dir=$(dirname "$launch_dir")
venv_dir=${HYBRID_IMAGENET_VENV:-$root_dir/.venv}
[[ $venv_dir == /* ]] || venv_dir=$PWD/$venv_dir
# shellcheck disable=SC2034  # for the scripts that source this file
cache_dir=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/hybrid_imagenet

EXIT_USAGE=2

say() { printf '%s\n' "$*" >&2; }

# die MESSAGE: one line, exit 1 (the machine lacks something).
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# usage_error MESSAGE: one line, exit 2 (the command line is wrong).
usage_error() {
  printf 'error: %s\n' "$*" >&2
  exit "$EXIT_USAGE"
}

# help_of FILE: prints the comment block under the first line of a script.
help_of() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$1"; }

# pins FILE: constraints.txt or hashes.txt; where $TENSORFLOW has a file of its own, its pins replace those of their names.
pins() {
  local own=$launch_dir/tensorflow-${TENSORFLOW:-}.txt hashes=0
  [[ -e $own ]] || { cat "$launch_dir/$1" && return; }
  [[ $1 != hashes.txt ]] || hashes=1
  awk -F == -v hashes=$hashes '/^#/ { next }
    NR == FNR { own[$1]; if (!hashes) sub(/ --hash=.*/, ""); print; next }
    !($1 in own)' "$own" "$launch_dir/$1"
}

# pinned NAME: its version.
pinned() { pins constraints.txt | sed -n "s/^$1==\([^ ;]*\).*/\1/p" | head -n 1; }

# print_command WORD...: the command as it can be pasted into a shell.
print_command() {
  local word line=()
  for word in "$@"; do
    # What needs no quotes stays readable; everything else goes into single quotes.
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      line+=("$word")
    else
      line+=("'${word//\'/\'\\\'\'}'")
    fi
  done
  printf '%s\n' "${line[*]}"
}

# check_path PATH WHAT: paths travel through Open MPI's and Horovod's own shell commands, where blanks split words.
check_path() {
  [[ $1 =~ ^[A-Za-z0-9_@%+=:,./~-]+$ ]] ||
    die "$2 '$1' holds a blank or a special character, which Open MPI cannot take: use another directory"
}

# check_number TEXT WHAT MAXIMUM: a whole number from 1.
check_number() {
  if ! [[ $1 =~ ^[1-9][0-9]{0,5}$ ]] || (($1 > $3)); then
    usage_error "$2 '$1': give a whole number from 1 to $3"
  fi
}

# check_name TEXT WHAT: the name of a network device or adapter, as the kernel allows them (no shell characters).
check_name() { [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._:-]{0,30}$ ]] || usage_error "$2 '$1': not a valid name"; }

# parse_hosts DEFAULT_SLOTS SPEC...: fills host_names and host_slots from HOST, HOST:SLOTS and comma-separated lists.
parse_hosts() {
  local default=$1 spec name slots seen=,
  shift
  host_names=() host_slots=()
  local IFS=', '
  set -f # a '*' must not become file names
  # shellcheck disable=SC2048,SC2086  # split at commas on purpose
  set -- $*
  set +f
  for spec in "$@"; do
    name=${spec%%:*} slots=$default
    [[ $spec == *:* ]] && slots=${spec#*:}
    [[ $name =~ ^[A-Za-z0-9]([A-Za-z0-9._-]{0,250}[A-Za-z0-9])?$ && ! $name =~ ^[0-9]+$ ]] ||
      usage_error "host '$spec': give HOST or HOST:SLOTS (letters, digits, '.', '-', '_')"
    [[ $slots =~ ^[1-9][0-9]{0,3}$ ]] || usage_error "host '$spec': the slots after ':' must be a whole number from 1"
    [[ $seen != *",$name,"* ]] || usage_error "host '$name' is named twice: write its slots as $name:N"
    seen+="$name,"
    host_names+=("$name") host_slots+=("$slots")
  done
  ((${#host_names[@]})) || usage_error "no hosts: an empty list names none"
}

# total_slots: the number of ranks on all hosts of parse_hosts.
total_slots() {
  local slots total=0
  for slots in "${host_slots[@]}"; do total=$((total + slots)); done
  printf '%s\n' "$total"
}

# hosts_argument: host_names and host_slots in the form of horovodrun -H.
hosts_argument() {
  local i list=()
  for i in "${!host_names[@]}"; do list+=("${host_names[i]}:${host_slots[i]}"); done
  local IFS=,
  printf '%s\n' "${list[*]}"
}

# run_command PROGRAM_FLAG...: fills command with the line that trains on the hosts of parse_hosts.
# shellcheck disable=SC2034
run_command() {
  command=("$venv_dir/bin/python" -m hybrid_imagenet run -np "$(total_slots)" -H "$(hosts_argument)" -- "$@")
}

# is_local HOST: whether ranks on HOST start without ssh.
is_local() { [[ $1 == localhost || $1 == 127.* || $1 == "$(hostname)" ]]; }

# supervise COMMAND...: becomes the process that runs a launcher (mpirun, or horovodrun which becomes mpirun), hands
# signals on to its ranks, ends it when they have ended, and returns their exit code.
supervise() { exec "$venv_dir/bin/python" -m hybrid_imagenet.resilience.supervisor -- "$@"; }
