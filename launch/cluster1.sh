#!/usr/bin/env bash
# launch/cluster1.sh [OPTION ...] HOST[:SLOTS] ... [FLAG ...]
#
# Trains on the layout of the paper's cluster 1 (Lu et al. §3.1): 3 hosts with 8 V100 each, RoCE with GPUDirect RDMA.
#
#   launch/cluster1.sh node1 node2 node3 --data_dir=/data/imagenet
#   HOSTS=node1,node2,node3 launch/cluster1.sh --data_dir=/data/imagenet
#   launch/cluster1.sh localhost:2 --flagfile=flags/digits.flags      (a trial on one machine without GPUs)
#
#   --dry-run         print the settings and the exact command, run nothing
#   --slots=N         ranks on hosts without :SLOTS (default: 8, one for each GPU)
#   --network-interfaces=NAME
#                     network interface for startup and TCP (default: $INTERFACE); set it on hosts with several
#   --ssh-port=N      port of sshd on the hosts
#   --module=NAME     run this Python module instead, such as hybrid_imagenet.benchmarks; put its arguments after --
#   --                pass everything after it to the program
#
# Every other argument with dashes is a flag of the program (python -m hybrid_imagenet.main --help). Write it as
# --name=value. The checkout and the environment must be at the same path on all hosts: use a shared file system, or run
# launch/setup.sh --gpu on each. ssh to the hosts must work without a password. Local rank r uses GPU r. Press Ctrl-C once
# to save and stop.
#
# The settings below are defaults; a variable that you have set is kept. If the RDMA adapter is missing, NCCL uses TCP and
# reports it only with NCCL_DEBUG=INFO. Set NCCL_NET=IB to make it an error.
set -euo pipefail
launch_directory=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
default_slots=8 settings=() flagfile=$(dirname "$launch_directory")/flags/cluster1.flags
# shellcheck source=launch/lib_cluster.sh
. "$launch_directory/lib_cluster.sh"

# RoCE is RDMA over Ethernet. NCCL uses it by default if an RDMA adapter is up; 0 makes that explicit, 1 would select TCP.
default_setting NCCL_IB_DISABLE 0
# NCCL_IB_GID_INDEX, the address of the adapter, is not set, because NCCL from 2.21 on finds that of RoCE v2 itself. For
# an older one, take it from the table of `show_gids`. With a wrong index the first all-reduce times out.
# The traffic class of RoCE packets, by which lossless Ethernet sorts them. Most switches are configured for 106 (DSCP 26).
default_setting NCCL_IB_TC 106
# GPUDirect RDMA: the adapter reads GPU memory directly if GPU and adapter are on the same CPU socket (PHB). Each host
# needs the nvidia-peermem module; without it NCCL copies through host memory.
default_setting NCCL_NET_GDR_LEVEL PHB
# The adapter reads GPU memory for sending too. By default NCCL does so on NVLink machines only.
default_setting NCCL_NET_GDR_READ 1
# Print the reason if the network fails. Otherwise the job would hang without a message.
default_setting NCCL_DEBUG WARN

cluster_main "$@"
