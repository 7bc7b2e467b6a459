#!/bin/bash
#SBATCH --job-name=grpo_qwen3_30b_a3b_32gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --chdir=/shared/work
#SBATCH --output=/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000/launch/job-%j.txt
#SBATCH --open-mode=append

# grpo_qwen3_30b_a3b_32gpu: 32 processes on 4 nodes. By hand: sbatch job.sh
set -euo pipefail
run_dir=/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000
# Where processes meet: the address that Slurm itself knows the first node by.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_ADDR=$(scontrol show node --oneliner "$head" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
[ -n "$MASTER_ADDR" ] || { echo "megarl: no address of the first node, $head" >&2; exit 1; }
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

srun --kill-on-bad-exit=1 --output=/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000/launch/job-%j.node-%n.txt \
  bash "$run_dir/launch/node.sh"
