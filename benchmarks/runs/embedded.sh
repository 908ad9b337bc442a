#!/usr/bin/env bash
# Make the model that comes with the package: a blank one, taught by the exact player on the train split, stopped early.
# About five minutes on two cores. Usage: benchmarks/runs/embedded.sh [folder]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python benchmarks/runs/blank_model.py "$work/blank"
ragen teach --model "$work/blank" --env ragen/Sokoban-v0 --lessons 16384 --epochs 3 --out "$work/taught"
target=${1:-ragen_agent/embedded}
mkdir -p "$target"
cp "$work"/taught/{config.json,model.safetensors,tokenizer.json,tokenizer_config.json,chat_template.jinja,ragen.json} "$target"
