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
# launch/slurm.sh as a batch script; the paper's cluster 1 unless options of sbatch say otherwise:
#
#   sbatch launch/slurm.sh --data_dir=/data/imagenet
#   sbatch --nodes=6 --ntasks-per-node=4 --gpus-per-node=4 launch/slurm.sh --flagfile=flags/cluster2.flags ...
#   DRY_RUN=1 sbatch launch/slurm.sh ...        (writes the command to the log, runs nothing)
#
# Submit it from the checkout, which all nodes must see at the same path, with the environment (launch/setup.sh --gpu).
# One rank per task. Five minutes before the time limit all ranks save and stop; the job then queues again and continues
# from the checkpoint. So it does on preemption with PreemptParameters=send_user_signal and a GraceTime. Words after the
# script are flags of the program; the run directory is runs/slurm-JOBID unless --run_dir is among them.
set -euo pipefail
# Slurm runs a copy of this file, so the checkout is where the job was submitted.
if [[ -n ${SLURM_SUBMIT_DIR:-} && -e $SLURM_SUBMIT_DIR/launch/lib.sh ]]; then
  scripts=$SLURM_SUBMIT_DIR/launch
else
  scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
fi
[[ -e $scripts/lib.sh ]] || { echo "error: submit launch/slurm.sh from the checkout's directory" >&2 && exit 2; }
# shellcheck source=launch/lib.sh
. "$scripts/lib.sh"

case ${1:-} in
  -h | --help) awk 'NR > 1 && !/^#/ { exit } /^# |^#$/ { sub(/^# ?/, ""); print }' "$scripts/slurm.sh" && exit 0 ;;
esac
[[ -n ${SLURM_JOB_ID:-} ]] || usage_error "not inside a Slurm job: submit it with  sbatch launch/slurm.sh"

tasks=${SLURM_NTASKS_PER_NODE:-8}
check_number "$tasks" SLURM_NTASKS_PER_NODE 1024
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
parse_hosts "$tasks" "${nodes[@]}"

# --resume: a job that was queued again continues in its directory.
run_command "--flagfile=$root_dir/flags/cluster1.flags" "--run_dir=runs/slurm-$SLURM_JOB_ID" "$@" --resume
if [[ -n ${DRY_RUN:-} ]]; then
  print_command "${command[@]}"
  exit 0
fi
# shellcheck source=launch/env.sh
. "$scripts/env.sh"
# Some builds of Open MPI have no plug-in for Slurm: they start their daemons over ssh.
if ! ompi_info --parsable 2>/dev/null | grep -q '^mca:plm:slurm:'; then
  export OMPI_MCA_plm=rsh OMPI_MCA_ras=^slurm
  say "this Open MPI has no Slurm plug-in: ranks start over ssh, which must work between the nodes without a password"
fi
# Slurm's USR1 reaches this process alone (B: above), which hands it to all ranks. What was stopped so queues again.
exec "${command[@]:0:4}" --preempted "scontrol requeue $SLURM_JOB_ID" "${command[@]:4}"
