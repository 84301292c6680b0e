#!/usr/bin/env bash
# launch/cluster2.sh [OPTION ...] HOST[:SLOTS] ... [FLAG ...]
#
# Trains on the layout of the paper's cluster 2 (Lu et al. §3.1): 6 hosts with 4 P40 each, RoCE without GPUDirect.
#
#   launch/cluster2.sh node1 node2 node3 node4 node5 node6 --data_dir=/data/imagenet
#   HOSTS=node1,node2,node3,node4,node5,node6 launch/cluster2.sh --data_dir=/data/imagenet
#   launch/cluster2.sh localhost:2 --flagfile=flags/digits.flags      (a trial on one machine without GPUs)
#
#   --dry-run         print the settings and the exact command, run nothing
#   --slots=N         ranks on hosts without :SLOTS (4, one for each GPU)
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
default_slots=4 settings=() flagfile=$(dirname "$launch_directory")/flags/cluster2.flags
# shellcheck source=launch/lib_cluster.sh
. "$launch_directory/lib_cluster.sh"

# RoCE is verbs over Ethernet: NCCL uses it by itself if an RDMA adapter is up. 0 says so explicitly; 1 would be TCP.
default_setting NCCL_IB_DISABLE 0
# Which address of the adapter to use: NCCL finds that of RoCE v2 itself. One older than 2.21 needs NCCL_IB_GID_INDEX,
# by the table of `show_gids`; the wrong one shows as a time-out at the first all-reduce.
# Traffic class of RoCE packets. Lossless Ethernet sorts by it; 106 (DSCP 26) is what most switches are set up for.
default_setting NCCL_IB_TC 106
# GPUDirect RDMA is off: P40 cards behind these adapters cannot use it (Lu et al. §3.1), and NCCL's attempt would cost time.
default_setting NCCL_NET_GDR_LEVEL LOC
# The cards have PCIe only. NCCL copies between two of them directly on one CPU socket (PHB); across sockets host memory
# is faster.
default_setting NCCL_P2P_LEVEL PHB
# A failing network shows as an error with its reason, not as a silent hang.
default_setting NCCL_DEBUG WARN

cluster_main "$@"
