#!/bin/bash
#SBATCH --job-name=grpo_qwen3_30b_a3b_32gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --chdir=/shared/work
#SBATCH --output=/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000/launch/job-%j.txt
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append

# grpo_qwen3_30b_a3b_32gpu: 32 processes on 4 nodes. By hand: sbatch job.sh
set -euo pipefail
run_dir=/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000
unset PYTHONSAFEPATH
cd "$run_dir/launch"
exec /shared/venv/bin/python -m slurm_job "$run_dir"
