#!/bin/sh
# launch/container_user.sh [ROOT]
#
# Creates the user mpiuser in a container image. It can start ranks in other containers over ssh without root, because it
# has its own sshd on port 2222. Keys are never part of an image. They are mounted at ~/.ssh (id_rsa, id_rsa.pub,
# authorized_keys), as Kubeflow's MPI operator does. launch/container_sshd.sh creates a host key and starts the server.
#
# ROOT is a prefix for tests. Without it the script changes the running system.
set -eu
root=${1:-}
home=$root/home/mpiuser

[ -n "$root" ] || useradd --create-home --uid 1000 --shell /bin/bash mpiuser
mkdir -p "$home/.ssh" "$root/workspace" "$root/etc/ssh/ssh_config.d"

cat >"$home/.sshd_config" <<'SERVER'
Port 2222
AuthorizedKeysFile .ssh/authorized_keys
PidFile none
UsePAM no
PasswordAuthentication no
# The mounted keys may belong to another user.
StrictModes no
SERVER
cat >"$root/etc/ssh/ssh_config.d/mpiuser.conf" <<'CLIENT'
# Containers get new host keys at each start, so ssh cannot check them. Use a private network.
Host *
  Port 2222
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CLIENT

[ -n "$root" ] || chown -R mpiuser:mpiuser "$home" "$root/workspace"
