#!/bin/sh
# launch/container_user.sh [ROOT]
#
# Makes the user mpiuser of a container image, who can start ranks on other containers over ssh without root: an sshd on
# port 2222 with files of his own. Keys are never part of an image; they are mounted at ~/.ssh (id_rsa, id_rsa.pub,
# authorized_keys), as Kubeflow's MPI operator does. launch/container_sshd.sh starts the server, with a host key of its own.
#
# ROOT is a prefix for trying this out; without it, users are made in the running system.
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
# The mounted keys belong to whom the mount says.
StrictModes no
SERVER
cat >"$root/etc/ssh/ssh_config.d/mpiuser.conf" <<'CLIENT'
# Containers get new host keys at each start, so none can be known: only a private network keeps strangers out.
Host *
  Port 2222
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CLIENT

[ -n "$root" ] || chown -R mpiuser:mpiuser "$home" "$root/workspace"
