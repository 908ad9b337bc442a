#!/usr/bin/env bash
# Make the model that comes with the package: a blank one, taught on the train split by the exact player with errors. First with
# all turns in view, then with the current state alone; last by a player whose every move slips with probability 0.4, so that the
# model knows more than it shows. About twenty minutes on two cores.
# Usage: benchmarks/runs/embedded.sh [folder]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python benchmarks/runs/blank_model.py "$work/blank"
ragen teach --model "$work/blank" --lessons 16384 --epochs 5 --noise 0.6 --out "$work/first"
ragen teach --model "$work/first" --window 1 --seed 1 --lessons 16384 --epochs 4 --lr 2e-3 --noise 0.6 --out "$work/second"
ragen teach --model "$work/second" --seed 2 --lessons 5000 --epochs 1 --lr 1e-3 --slip 0.4 --keep-failures --out "$work/third"
target=${1:-ragen_agent/embedded}
mkdir -p "$target"
cp "$work"/third/{config.json,model.safetensors,tokenizer.json,tokenizer_config.json,chat_template.jinja,ragen.json} "$target"
