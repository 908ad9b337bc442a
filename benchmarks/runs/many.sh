#!/usr/bin/env bash
# Train by several processes: how weights are held is said by a config of accelerate beside this file; all else are flags of `ragen train`.
# Usage: benchmarks/runs/many.sh ddp|fsdp2|zero2 [processes] [flags of ragen train]...
#   benchmarks/runs/many.sh ddp 2 --steps 3 --out runs/two
# Several machines: run it on each with MACHINES, MACHINE (0, 1...) and MASTER (the first one's address) set; `processes` counts those of all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
kind=${1:?ddp, fsdp2 or zero2}
if [ ! -f "benchmarks/runs/$kind.yaml" ]; then
  echo "no config $kind; known: ddp, fsdp2, zero2" >&2
  exit 2
fi
if [ "$kind" = zero2 ] && ! python -c 'import importlib.util as i, sys; sys.exit(i.find_spec("deepspeed") is None)'; then
  echo 'zero2 needs the package deepspeed: pip install -e ".[deepspeed]"' >&2
  exit 2
fi
processes=${2:-2}
shift "$(($# < 2 ? $# : 2))"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec accelerate launch --config_file "benchmarks/runs/$kind.yaml" --num_processes "$processes" --num_machines "${MACHINES:-1}" \
  --machine_rank "${MACHINE:-0}" --main_process_ip "${MASTER:-127.0.0.1}" --main_process_port "${PORT:-29500}" -m ragen_agent.train "$@"
