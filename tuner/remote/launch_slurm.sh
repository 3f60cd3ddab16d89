#!/usr/bin/env bash
# @title@
# Submit it with `sbatch @script@`. When it is submitted again, the study goes on.
@options@
set -euo pipefail
@needs@
cd @directory@
@setup@
# With a token on it, a head wants one of everybody; the others send it only when they are told to.
if [ -e ~/.ray/auth_token ]; then export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}; fi
read -r head _ < <(hostname -I)
# Nodes of one job may take minutes to get going; Ray would wait for 30 s.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600

# Before the time is up, and at a preemption, the trials save; then the job queues again, and goes on.
save() {
  again=1
  @stop@ || true
}
trap save TERM
srun --ntasks-per-node=1 \
  python -m ray.scripts.scripts symmetric-run --address "$head:6379" --min-nodes @nodes@ \
  --num-cpus @cpus@ --num-gpus @gpus@ --disable-usage-stats \
  -- @run@ --address "$head:6379" &
srun=$! code=0
wait "$srun" || wait "$srun" || code=$?
if [ -n "${again:-}" ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
[ "$code" = 0 ] || exit "$code"
# symmetric-run ends with 0 also where Ray did not start.
@status@ --format json | grep --quiet --extended-regexp '"state": "(finished|stopped)"'
