#!/bin/bash
# One node of job.sh: its number is SLURM_NODEID.
set -euo pipefail
cd /shared/work
export NODE_RANK="$SLURM_NODEID"
if [ "${1:-}" = preflight ]; then
  exec /shared/venv/bin/python -P -m megarl.launchers.preflight "${@:2}"
fi
exec /shared/venv/bin/python -P -m megarl train /shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000/launch/recipe.yaml --launcher torchrun --run-dir /shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000 "$@"
