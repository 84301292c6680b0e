# shellcheck shell=bash
# The common part of launch/cluster1.sh and launch/cluster2.sh: arguments, checks of the hosts, the horovodrun command.
#
# A script that sources this file sets default_slots and flagfile, exports its network settings with default_setting, and
# calls cluster_main "$@".

# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SSH_SECONDS=10
: "${default_slots:?}" "${flagfile:?}"

# default_setting NAME VALUE: exports a variable to all ranks, through horovodrun. It keeps the user's value if there is
# one, and removes a variable that the user has set to an empty value.
default_setting() {
  if [[ -z ${!1+x} ]]; then
    export "$1=$2"
  elif [[ -z ${!1} ]]; then
    unset "$1"
    return
  fi
  settings+=("$1")
}

# ring_of_the_papers RANKS: selects a ring all-reduce as in the papers, because NCCL may use a tree for small messages.
# With more than 64 ranks NCCL chooses, because a ring is slow for small messages then. NCCL_ALGO= (empty) also lets NCCL
# choose. Use it on hosts with NVSwitch and SHARP (H100), where NVLS and CollNet are faster than any ring.
ring_of_the_papers() {
  if (($1 <= 64)); then default_setting NCCL_ALGO Ring; fi
}

cluster_main() {
  local program argument dry_run=0 ssh_port='' interface=${INTERFACE:-} module='' specs=() flags=() before_separator=1
  for argument in "$@"; do
    if ((!before_separator)); then
      flags+=("$argument")
      continue
    fi
    case $argument in
      -h | --help) help_of "$0" && exit 0 ;;
      --dry[-_]run) dry_run=1 ;;
      --slots=*) default_slots=${argument#*=} ;;
      --ssh[-_]port=*) ssh_port=${argument#*=} ;;
      --network[-_]interfaces=*) interface=${argument#*=} ;;
      --module=*) module=${argument#*=} ;;
      --) before_separator=0 ;;
      -*=* | --*) flags+=("$argument") ;;
      -*) usage_error "Unknown option $argument. See $0 --help." ;;
      *) specs+=("$argument") ;;
    esac
  done
  check_number "$default_slots" --slots 1024
  [[ -z $ssh_port ]] || check_number "$ssh_port" --ssh-port 65535
  [[ -z $interface ]] || check_name "$interface" --network-interfaces
  [[ -z $module || $module =~ ^[A-Za-z_][A-Za-z0-9_.]*$ ]] ||
    usage_error "--module '$module' is not valid. Use the name of a Python module."
  ((${#specs[@]})) || [[ -z ${HOSTS:-} ]] || specs=("$HOSTS")
  ((${#specs[@]})) || usage_error "There are no hosts. Name them as arguments or in HOSTS (see $0 --help)."
  parse_hosts "$default_slots" "${specs[@]}"
  ring_of_the_papers "$(total_slots)"
  check_path "$venv_dir" "the directory of the environment"
  program=("$venv_dir/bin/python" -m "${module:-hybrid_imagenet.main}")
  [[ -n $module ]] || program+=("--flagfile=$flagfile")
  program+=("${flags[@]}")
  build_command
  if ((dry_run)); then
    print_command . "$launch_dir/env.sh"
    show_settings
    print_command "${command[@]}"
    exit 0
  fi
  run_cluster
}

# build_command: sets the array command to the horovodrun command line. horovodrun passes hosts, interface and --mpi-args
# to a shell without quotes, so they have been checked for special characters.
build_command() {
  # --prefix is the path of Open MPI on the other hosts.
  local mpi_args="--prefix $venv_dir"
  command=(horovodrun -np "$(total_slots)" -H "$(hosts_argument)" --mpi --disable-cache)
  [[ -z $ssh_port ]] || command+=(--ssh-port "$ssh_port")
  if [[ -n $interface ]]; then
    command+=(--network-interfaces "$interface")
    mpi_args+=" --mca oob_tcp_if_include $interface"
  fi
  command+=("--mpi-args=$mpi_args")
  command+=("${program[@]}")
}

show_settings() {
  local name words=()
  for name in "${settings[@]}"; do words+=("$name=${!name}"); done
  printf 'export %s\n' "$(print_command "${words[@]}")"
}

run_cluster() {
  # shellcheck source=launch/env.sh
  . "$launch_dir/env.sh"
  # This host may have neither GPUs nor images. That does not matter, because the ranks run on other hosts.
  [[ -n $module ]] || HYBRID_IMAGENET_RANKS_ELSEWHERE=1 "${program[@]}" --check_only > /dev/null || exit $?
  check_hosts
  supervise "${command[@]}"
}

# check_hosts: checks that each remote host answers over ssh without a password and has the environment, the checkout and
# the network interface. It checks all hosts at once and prints one line for each host with a problem.
check_hosts() {
  local host children=() child bad=0
  for host in "${host_names[@]}"; do
    check_host "$host" &
    children+=($!)
  done
  for child in "${children[@]}"; do wait "$child" || bad=1; done
  ((!bad)) || exit "$EXIT_USAGE"
}

# check_host HOST: prints one line and fails if ranks cannot be started on a host.
check_host() {
  local script answer code=0 ask=(bash -s)
  script="
    fail() { echo \"\$*\"; exit 9; }
    [ -x $venv_dir/bin/python ] || fail 'There is no environment at $venv_dir. Run launch/setup.sh there.'
    [ -r $flagfile ] || fail 'There is no checkout at $root_dir. It must be at the same path on all hosts.'
    [ -z '$interface' ] || [ -e '/sys/class/net/$interface' ] ||
      fail There is no network interface '$interface'. Use one of: \$(ls /sys/class/net)"
  if ! is_local "$1"; then
    ask=(ssh -o BatchMode=yes -o "ConnectTimeout=$SSH_SECONDS")
    [[ -z $ssh_port ]] || ask+=(-p "$ssh_port")
    ask+=("$1" bash -s)
  fi
  answer=$(timeout $((SSH_SECONDS + 10)) "${ask[@]}" <<<"$script" 2>&1) || code=$?
  # The reason is on the last line. Login scripts and ssh may have printed other lines before it.
  answer=$(tr -d '\r' <<<"$answer" | grep . | tail -n 1 || true)
  case $code in
    0) return 0 ;;
    9) say "error: host $1: $answer" ;;
    124) say "error: host $1: No answer over ssh within $((SSH_SECONDS + 10)) s. Check its name, network and sshd." ;;
    *) say "error: host $1: ssh failed (${answer:-exit $code}). A login without a password must work." ;;
  esac
  return 1
}
