#!/usr/bin/env bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# A training file of your own under Slurm, on one rank for each task:  sbatch examples/slurm.sh
#
# Submit it from the checkout, which all nodes see at the same path. resume.py saves after each epoch, so a job that is
# queued again continues where it was. The program itself has launch/slurm.sh, which also saves before the time limit.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
# shellcheck source=launch/env.sh
. launch/env.sh

tasks=${SLURM_NTASKS_PER_NODE:-4}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$tasks/" | paste -sd,)
exec hybrid-imagenet run -H "$hosts" examples/resume.py --epochs=20 --folder="checkpoints-$SLURM_JOB_ID"
