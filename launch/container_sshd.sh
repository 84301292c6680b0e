#!/bin/sh
# launch/container_sshd.sh
#
# What a worker container runs: an sshd for ranks that another container starts here (launch/container_user.sh). The host
# key is made at each start. When the container is told to end (TERM, as an eviction does), its ranks are asked to save
# and leave first; they carry the request to all others.
set -eu
key=$HOME/.sshd_host_key
[ -e "$key" ] || ssh-keygen -q -t ed25519 -N '' -f "$key"
/usr/sbin/sshd -De -f "$HOME/.sshd_config" -h "$key" &
server=$!

# ranks: the processes of this container that train.
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
