#!/usr/bin/env bash
#SBATCH --job-name=hybrid-imagenet
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:USR1@300
# launch/slurm.sh, a batch script. It uses the layout of the paper's cluster 1 unless you pass options to sbatch:
#
#   sbatch launch/slurm.sh --data_dir=/data/imagenet
#   sbatch --nodes=6 --ntasks-per-node=4 --gpus-per-node=4 launch/slurm.sh --flagfile=flags/cluster2.flags ...
#   DRY_RUN=1 sbatch launch/slurm.sh ...        (writes the command to the log, runs nothing)
#
# Submit it from the checkout. All nodes must have the checkout and the environment (launch/setup.sh --gpu) at the same
# path. Each task becomes one rank. Five minutes before the time limit all ranks save and stop; then the job is queued
# again and continues from the checkpoint. The same happens on preemption if the cluster has
# PreemptParameters=send_user_signal and a GraceTime. Arguments after the script are flags of the program. Without
# --recipe and --flagfile, flags/cluster1.flags is used. The run directory is runs/slurm-JOBID unless you set --run_dir.
set -euo pipefail
# Slurm runs a copy of this file, so the checkout is the directory from which the job was submitted.
if [[ -n ${SLURM_SUBMIT_DIR:-} && -e $SLURM_SUBMIT_DIR/launch/lib.sh ]]; then
  scripts=$SLURM_SUBMIT_DIR/launch
else
  scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
fi
if [[ ! -e $scripts/lib.sh ]]; then
  echo "error: The checkout was not found. Submit launch/slurm.sh from its directory." >&2
  exit 2
fi
# shellcheck source=launch/lib.sh
. "$scripts/lib.sh"

case ${1:-} in
  -h | --help) awk 'NR > 1 && !/^#/ { exit } /^# |^#$/ { sub(/^# ?/, ""); print }' "$scripts/slurm.sh" && exit 0 ;;
esac
[[ -n ${SLURM_JOB_ID:-} ]] || usage_error "This is not a Slurm job. Submit the script with: sbatch launch/slurm.sh"

tasks=${SLURM_NTASKS_PER_NODE:-8}
check_number "$tasks" SLURM_NTASKS_PER_NODE 1024
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
parse_hosts "$tasks" "${nodes[@]}"

# A job that was queued again continues in its directory (--resume).
defaults=("--flagfile=$root_dir/flags/cluster1.flags")
for argument in "$@"; do
  # The learning rate of cluster 1 would replace that of another recipe.
  case $argument in
    --flagfile | --flagfile=* | --recipe | --recipe=*) defaults=() ;;
  esac
done
run_command "${defaults[@]}" "--run_dir=runs/slurm-$SLURM_JOB_ID" "$@" --resume
if [[ -n ${DRY_RUN:-} ]]; then
  print_command "${command[@]}"
  exit 0
fi
# shellcheck source=launch/env.sh
. "$scripts/env.sh"
# Some builds of Open MPI have no plug-in for Slurm. They must start their daemons over ssh.
if ! ompi_info --parsable 2>/dev/null | grep -q '^mca:plm:slurm:'; then
  export OMPI_MCA_plm=rsh OMPI_MCA_ras=^slurm
  say "This Open MPI has no Slurm plug-in, so ranks start over ssh. It must work between the nodes without a password."
fi
# Slurm sends USR1 to this process only (B: above), which passes it on to all ranks. After that the job is queued again.
exec "${command[@]:0:4}" --preempted "scontrol requeue $SLURM_JOB_ID" "${command[@]:4}"
