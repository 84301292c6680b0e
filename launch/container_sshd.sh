#!/bin/sh
# launch/container_sshd.sh
#
# The main process of a worker container: an sshd, through which another container starts ranks here
# (launch/container_user.sh). The host key is created at each start. When the container gets TERM, for example because it
# is evicted, the script first asks its ranks to save and end. They pass the request on to all other ranks.
set -eu
key=$HOME/.sshd_host_key
[ -e "$key" ] || ssh-keygen -q -t ed25519 -N '' -f "$key"
/usr/sbin/sshd -De -f "$HOME/.sshd_config" -h "$key" &
server=$!

# ranks: prints the processes of this container that train.
ranks() {
  for directory in /proc/[0-9]*; do
    case $(tr '\0' ' ' <"$directory/cmdline" 2>/dev/null) in
      *python*hybrid_imagenet.main* | *python*hybrid_imagenet\ train*) echo "${directory#/proc/}" ;;
    esac
  done
}

stop() {
  # shellcheck disable=SC2046  # one word for each rank
  kill -USR1 $(ranks) 2>/dev/null || true
  while [ -n "$(ranks)" ]; do sleep 1; done
  kill "$server"
}

trap stop TERM INT
wait "$server" || true
