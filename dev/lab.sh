#!/usr/bin/env bash
# dev/lab.sh [--hosts=3] [--slots=8] [--rate=1gbit] -- COMMAND ...
#
# Simulates a cluster on one machine, to test launchers and slow networks. Each host is a set of Linux namespaces with its
# own name (lab1, lab2, ...), processes, loopback, address (10.99.0.1, ...) on eth0, and sshd. Files are shared. All hosts
# are connected to one bridge, and each link is limited to --rate in both directions. COMMAND runs on lab1 with
# HOSTS=lab1:8,lab2:8,... and INTERFACE=eth0, which launch/cluster1.sh and launch/cluster2.sh read:
#
#   dev/lab.sh --hosts=2 --slots=2 --rate=1gbit -- launch/cluster1.sh --flagfile=flags/digits.flags --epochs=1
#
# The script returns the exit code of COMMAND. Everything is removed at the end, and after Ctrl-C or a kill. It needs root,
# iproute2, util-linux and openssh-server.
#
#   --hosts=N    number of hosts, 1 to 64
#   --slots=N    ranks per host in HOSTS
#   --rate=RATE  bandwidth of each link, such as 100mbit or 10gbit, or none for no limit
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

NETWORK=10.99.0

main() {
  local hosts=3 slots=8 rate=1gbit
  while (($#)); do
    case $1 in
      -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;;
      --hosts=*) hosts=${1#*=} ;;
      --slots=*) slots=${1#*=} ;;
      --rate=*) rate=${1#*=} ;;
      --) shift && break ;;
      *) usage_error "Unknown option $1. Write -- before the command (see dev/lab.sh --help)." ;;
    esac
    shift
  done
  (($#)) || usage_error "There is no command. Write it after -- (see dev/lab.sh --help)."
  check_number "$hosts" --hosts 64
  check_number "$slots" --slots 1024
  [[ $rate == none || $rate =~ ^[1-9][0-9]{0,5}[kmg]bit$ ]] ||
    usage_error "--rate '$rate' is not valid. Use a number with kbit, mbit or gbit, or none."
  check_tools
  remove_leftovers
  lab_dir=$(mktemp -d "${TMPDIR:-/tmp}/hybrid_imagenet_lab.XXXXXX")
  echo $$ >"$lab_dir/pid"
  host_pids=() command_pid=''
  trap remove_lab EXIT
  trap 'stop_command 130' INT
  trap 'stop_command 143' TERM HUP
  write_ssh_files "$hosts"
  start_switch
  local i
  for ((i = 1; i <= hosts; i++)); do start_host "$i" "$rate"; done
  for ((i = 1; i <= hosts; i++)); do await_sshd "$i"; done
  run_command "$hosts" "$slots" "$@"
}

check_tools() {
  local tool missing=()
  [[ $(id -u) == 0 ]] || die "dev/lab.sh needs root to create network namespaces. Run it as root."
  for tool in ip tc unshare nsenter setpriv ssh-keygen; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  sshd=$(command -v sshd || echo /usr/sbin/sshd)
  [[ -x $sshd ]] || missing+=(sshd)
  ((!${#missing[@]})) ||
    die "Programs were not found: ${missing[*]}. Install them (Debian: apt install iproute2 util-linux openssh-server)."
  unshare --net --uts --mount --pid --fork true 2>/dev/null || die "This machine does not allow network namespaces."
}

# remove_leftovers: removes files of labs that were ended by kill -9. Nothing else remains of them, because namespaces end
# with their processes, which end with the lab.
remove_leftovers() {
  local directory owner
  for directory in "${TMPDIR:-/tmp}"/hybrid_imagenet_lab.*/; do
    owner=$(cat "$directory/pid" 2>/dev/null) || continue
    [[ -e /proc/$owner && $(tr '\0' ' ' <"/proc/$owner/cmdline") == *lab.sh* ]] || rm -rf "$directory"
  done
}

# shellcheck disable=SC2329  # called by a trap
remove_lab() {
  local pid
  trap '' INT TERM HUP
  # When the first process of a host ends, the kernel ends all others there, and the network with the last one.
  for pid in "${host_pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for pid in "${host_pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$lab_dir"
}

# stop_command CODE: asks the command to stop, waits up to 10 s, and exits.
# shellcheck disable=SC2329  # called by a trap
stop_command() {
  trap '' INT TERM HUP
  local inner second
  inner=$(children_of "$command_pid")
  if [[ -n $inner ]]; then
    kill -TERM "$inner" 2>/dev/null || true
    for ((second = 0; second < 100; second++)); do
      kill -0 "$command_pid" 2>/dev/null || break
      sleep 0.1
    done
  fi
  exit "$1"
}

children_of() { [[ -n $1 ]] && cat "/proc/$1/task/$1/children" 2>/dev/null || true; }

# write_ssh_files HOSTS: creates a key for this lab, and the client and server settings that use it.
write_ssh_files() {
  local i
  ssh-keygen -q -t ed25519 -N '' -f "$lab_dir/key"
  mkdir "$lab_dir/ssh_config.d"
  cat >"$lab_dir/ssh_config.d/lab.conf" <<CLIENT
Host *
  IdentityFile $lab_dir/key
  IdentitiesOnly yes
  UserKnownHostsFile $lab_dir/known_hosts
CLIENT
  echo "* $(cat "$lab_dir/key.pub")" >"$lab_dir/known_hosts"
  cat >"$lab_dir/sshd_config" <<SERVER
HostKey $lab_dir/key
AuthorizedKeysFile $lab_dir/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SERVER
  { echo '127.0.0.1 localhost' && for ((i = 1; i <= $1; i++)); do echo "$NETWORK.$i lab$i"; done; } >"$lab_dir/hosts"
  # sshd does not start without this directory.
  mkdir -p /run/sshd
}

# start_namespaces COMMAND...: starts a process in new namespaces. They end when it ends, or when this script ends.
start_namespaces() {
  setpriv --pdeathsig KILL unshare --net --uts --mount --pid --fork --kill-child=KILL --mount-proc "$@" \
    </dev/null >>"$lab_dir/log" 2>&1 &
  host_pids+=($!)
  # The namespaces exist as soon as the first process inside exists.
  local tries
  for ((tries = 0; tries < 100; tries++)); do
    [[ -z $(children_of "$!") ]] || return 0
    sleep 0.05
  done
  die "The namespaces of a host did not start: $(tail -n 1 "$lab_dir/log")"
}

start_switch() {
  start_namespaces sleep infinity
  in_network 0 ip link add br0 type bridge
  in_network 0 ip link set br0 up
}

# in_network INDEX COMMAND...: runs a command in the network of the switch (0) or of a host.
in_network() {
  local index=$1
  shift
  nsenter --net="/proc/${host_pids[index]}/ns/net" "$@"
}

# start_host INDEX RATE: starts a host with its name and sshd, and connects it to the switch.
start_host() {
  local index=$1 rate=$2
  # shellcheck disable=SC2016  # for the shell inside
  start_namespaces sh -c '
    hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/ssh_config.d" /etc/ssh/ssh_config.d &&
      mount -t tmpfs -o size=50% tmpfs /dev/shm && mount -t sysfs sysfs /sys && exec "$3" -D -e -f "$2/sshd_config"' \
    sh "lab$index" "$lab_dir" "$sshd"
  in_network 0 ip link add "port$index" type veth peer name eth0 netns "${host_pids[index]}"
  in_network 0 ip link set "port$index" master br0 up
  in_network "$index" ip link set lo up
  in_network "$index" ip address add "$NETWORK.$index/24" dev eth0
  in_network "$index" ip link set eth0 up
  if [[ $rate != none ]]; then
    limit "$index" eth0 "$rate"  # for sending
    limit 0 "port$index" "$rate" # for receiving
  fi
}

# limit INDEX DEVICE RATE: adds a token bucket for 10 ms of traffic, but at least for the largest packet of the kernel.
limit() {
  local number=${3%[kmg]bit} bytes
  case $3 in
    *kbit) bytes=$((number * 1000 / 800)) ;;
    *mbit) bytes=$((number * 1000000 / 800)) ;;
    *gbit) bytes=$((number * 1000000000 / 800)) ;;
  esac
  ((bytes >= 70000)) || bytes=70000
  in_network "$1" tc qdisc add dev "$2" root tbf rate "$3" burst "$bytes" latency 50ms
}

await_sshd() {
  local tries
  for ((tries = 0; tries < 100; tries++)); do
    in_network "$1" bash -c ": </dev/tcp/$NETWORK.$1/22" 2>/dev/null && return 0
    sleep 0.1
  done
  die "sshd of lab$1 did not answer within 10 s: $(tail -n 1 "$lab_dir/log")"
}

# run_command HOSTS SLOTS COMMAND...: runs the command on lab1, in all its namespaces, in the current directory.
run_command() {
  local count=$1 slots=$2 i list=() code=0 inner
  shift 2
  for ((i = 1; i <= count; i++)); do list+=("lab$i:$slots"); done
  inner=$(children_of "${host_pids[1]}")
  # Open MPI names its directory by host and process, so two labs could use the same one. Set another place.
  HOSTS=$(IFS=, && echo "${list[*]}") INTERFACE=eth0 OMPI_MCA_orte_tmpdir_base=$lab_dir nsenter --all --target "${inner%% *}" --wd="$PWD" -- "$@" &
  command_pid=$!
  wait "$command_pid" || code=$?
  exit "$code"
}

main "$@"
