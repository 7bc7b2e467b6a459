#!/bin/bash
# One node of job.sh: its number is SLURM_NODEID.
set -euo pipefail
cd /shared/work
export NODE_RANK="$SLURM_NODEID"
if [ "${1:-}" = preflight ]; then
  exec /shared/venv/bin/python -P -m megarl.launchers.preflight "${@:2}"
fi
over=/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000/launch/over."$MEGARL_ATTEMPT"
kind=()
[ -z "${MEGARL_NODES_OF:-}" ] || kind=(--resources='{"'"$MEGARL_NODES_OF"'": 1000}')
address="$MASTER_ADDR:$MASTER_PORT"
export RAY_worker_niceness=0 # Ray's own default, 15, is for machines that do something else beside
export RAY_prestart_worker_first_driver=0 # no actor takes a process that was started without its environment
if [ "$SLURM_NODEID" != 0 ]; then
  for _ in $(seq 300); do
    (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
    sleep 1
  done
  /shared/venv/bin/python -P -m megarl.launchers.ray_start --address="$address" "${kind[@]}" --block &
  node=$!
  trap 'kill "$node" 2> /dev/null || true' EXIT
  while kill -0 "$node" 2> /dev/null; do
    [ ! -e "$over" ] || exit 0
    sleep 1
  done
  [ -e "$over" ] && exit 0
  echo "megarl: Ray has ended on node $SLURM_NODEID" >&2
  exit 1
fi
/shared/venv/bin/python -P -m megarl.launchers.ray_start --head --node-ip-address="$MASTER_ADDR" --port="$MASTER_PORT" --include-dashboard=false \
  "${kind[@]}" --block &
node=$!
trap 'touch "$over"; kill "$node" 2> /dev/null || true' EXIT
for _ in $(seq 300); do
  (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
  sleep 1
done
/shared/venv/bin/python -P -m megarl.launchers.ray_nodes "$address" 4 300
RAY_ADDRESS="$address" /shared/venv/bin/python -P -m megarl train /shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000/launch/recipe.yaml --launcher ray --run-dir /shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000 "$@"
