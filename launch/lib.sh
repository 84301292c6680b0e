# shellcheck shell=bash
# Functions that the scripts of this directory share. Sourced, never run.

launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root_dir=$(dirname "$launch_dir")
venv_dir=${HYBRID_IMAGENET_VENV:-$root_dir/.venv}
[[ $venv_dir == /* ]] || venv_dir=$PWD/$venv_dir
# shellcheck disable=SC2034  # for the scripts that source this file
cache_dir=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/hybrid_imagenet

EXIT_USAGE=2

# What horovodrun gives mpirun: plain point-to-point transport, no verbs through Open MPI (NCCL has its own), and no
# binding, so that a rank's threads may use all the cores that the program divides among the ranks of a host. mpirun
# itself is quiet: a rank that fails has said why.
# shellcheck disable=SC2034
MPI_ARGUMENTS=(--quiet --mca pml ob1 --mca btl ^openib -bind-to none -map-by slot)

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

# resume_flag RUN_DIR: sets resume to --resume if an earlier start of this job has left a run there.
# shellcheck disable=SC2034
resume_flag() {
  resume=()
  [[ ! -e $1/config.json ]] || resume=(--resume)
}

# mpi_command PROGRAM...: fills command with the mpirun line for the hosts of parse_hosts, for schedulers that start
# Open MPI's daemons in their own way. Variables that the ranks need on other hosts are handed over by name.
mpi_command() {
  local name
  command=(mpirun "${MPI_ARGUMENTS[@]}" --prefix "$venv_dir" --tag-output -np "$(total_slots)" -H "$(hosts_argument)")
  while IFS= read -r name; do
    command+=(-x "$name")
  done < <(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|OPAL_PREFIX|VIRTUAL_ENV|(NCCL|HOROVOD|TF|HYBRID_IMAGENET)_.*)$')
  command+=("$@")
}

# is_local HOST: whether ranks on HOST start without ssh.
is_local() { [[ $1 == localhost || $1 == 127.* || $1 == "$(hostname)" ]]; }

# terminal_environment: ranks write into Open MPI's pseudo-terminal whatever our own output is, so tell them.
terminal_environment() {
  local size
  if [[ -t 1 ]] && size=$(stty size 2>/dev/null </dev/tty); then
    export HYBRID_IMAGENET_TERMINAL=1 LINES=${size% *} COLUMNS=${size#* }
  elif [[ -t 1 ]]; then
    export HYBRID_IMAGENET_TERMINAL=1
  else
    export HYBRID_IMAGENET_TERMINAL=0
  fi
}

# supervise COMMAND...: runs a launcher (mpirun, or horovodrun which becomes mpirun) and returns its exit code.
#
# Ctrl-C, TERM or USR1 once: mpirun hands SIGUSR1 to every rank on every host, which saves and stops; a TERM sent to
# mpirun itself would kill the ranks within a second. A second signal ends everything at once.
supervise() {
  local child code signals=0 errors filter
  # A session of its own keeps the terminal's Ctrl-C from reaching mpirun before us; if we are killed, it dies too.
  local wrapper=(setsid)
  if command -v setpriv >/dev/null && setpriv --pdeathsig TERM true 2>/dev/null; then
    wrapper=(setsid setpriv --pdeathsig TERM)
  fi
  exec {errors}> >(trap '' INT TERM HUP USR1 && drop_greetings >&2)
  filter=$!
  "${wrapper[@]}" "$@" </dev/null 2>&"$errors" {errors}>&- &
  child=$!
  exec {errors}>&-
  trap 'stop_ranks "$child"' INT TERM HUP USR1
  while :; do
    wait "$child" && code=0 || code=$?
    # wait returns early when a signal was trapped; go on until the launcher is really gone.
    kill -0 "$child" 2>/dev/null || break
  done
  # The status of a wait that a signal interrupted is not the launcher's: ask again, which answers at once.
  if ((signals)); then wait "$child" 2>/dev/null && code=0 || code=$?; fi
  wait "$filter" 2>/dev/null || true # it may have lines left to write
  trap - INT TERM HUP USR1
  return "$code"
}

# drop_greetings: what TensorFlow writes to standard error whatever its log settings, once or twice for every rank.
drop_greetings() {
  exec sed -u -e '/WARNING: All log messages before absl::InitializeLog() is called are written to STDERR/d' \
    -e '/ port\.cc:[0-9]*\] oneDNN custom operations are on/d' \
    -e '/ util\.cc:[0-9]*\] oneDNN supports DT_HALF only on platforms/d'
}

# stop_ranks PID: what supervise does on a signal.
stop_ranks() {
  signals=$((signals + 1))
  if ((signals == 1)); then
    say "stopping: the ranks save and leave; press Ctrl-C again to end them at once"
    kill -USR1 "$1" 2>/dev/null
  else
    kill -TERM -- "-$1" 2>/dev/null
  fi
}
