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
#   --slots=N         ranks on hosts without :SLOTS (8, one for each GPU)
#   --network-interfaces=NAME
#                     network interface for start-up and TCP (default $INTERFACE); name it on hosts with several
#   --ssh-port=N      port of sshd on the hosts
#   --module=NAME     run this Python module instead, such as hybrid_imagenet.benchmarks; its words come after --
#   --                everything after it goes to the program
#
# Every other word with dashes is a flag of the program (python -m hybrid_imagenet.main --help), written --name=value.
# The checkout and the environment must lie at the same path on all hosts (a shared file system, or launch/setup.sh
# --gpu on each), and ssh to them must work without a password. Local rank r takes GPU r. Ctrl-C once saves and stops.
#
# Settings below are defaults: a variable that you have set stays. With NCCL_NET=IB a missing RDMA adapter is an error;
# without it NCCL then takes TCP, which it says at NCCL_DEBUG=INFO only.
set -euo pipefail
launch_directory=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
default_slots=8 settings=() flagfile=$(dirname "$launch_directory")/flags/cluster1.flags
# shellcheck source=launch/lib_cluster.sh
. "$launch_directory/lib_cluster.sh"

# RoCE is verbs over Ethernet: NCCL uses it by itself if an RDMA adapter is up. 0 says so explicitly; 1 would be TCP.
default_setting NCCL_IB_DISABLE 0
# Which address of the adapter to use: NCCL finds that of RoCE v2 itself. One older than 2.21 needs NCCL_IB_GID_INDEX,
# by the table of `show_gids`; the wrong one shows as a time-out at the first all-reduce.
# Traffic class of RoCE packets. Lossless Ethernet sorts by it; 106 (DSCP 26) is what most switches are set up for.
default_setting NCCL_IB_TC 106
# GPUDirect RDMA: the adapter reads GPU memory itself when GPU and adapter are at most this far apart (PHB: the same CPU
# socket). It needs the nvidia-peermem module on each host; without it NCCL goes through host memory.
default_setting NCCL_NET_GDR_LEVEL PHB
# The adapter also reads GPU memory for sending. NCCL does this by itself on NVLink machines only.
default_setting NCCL_NET_GDR_READ 1
# A failing network shows as an error with its reason, not as a silent hang.
default_setting NCCL_DEBUG WARN

cluster_main "$@"
