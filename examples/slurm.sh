#!/usr/bin/env bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:USR1@90
# A training file of your own under Slurm, on one rank for each task:
#
#   sbatch examples/slurm.sh                              (trains examples/resume.py)
#   sbatch examples/slurm.sh train.py --epochs=20
#
# Submit it from the checkout, which all nodes see at the same path. Ninety seconds before the time limit, and on a
# preemption if the cluster has PreemptParameters=send_user_signal, Slurm sends USR1. The ranks then stop with exit code
# 75, and the job is queued again if it has saved a checkpoint. It continues from there, because hi.callbacks.Checkpoint
# restores the latest one. The training program itself has launch/slurm.sh.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
# shellcheck source=launch/env.sh
. launch/env.sh

(($#)) || set -- examples/resume.py --epochs=20 --folder="checkpoints-$SLURM_JOB_ID"
tasks=${SLURM_NTASKS_PER_NODE:-4}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$tasks/" | paste -sd,)
# exec, because Slurm sends USR1 to this process only (B: above), and the command passes it on to all ranks.
exec hybrid-imagenet run --preempted "scontrol requeue $SLURM_JOB_ID" -H "$hosts" "$@"
