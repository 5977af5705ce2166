#!/usr/bin/env bash
# Real handwritten digits on two ranks: dense, bf16, top-k and group top-k, three seeds each, then the comparison.
#
#   examples/demo.sh [OUT]      OUT: where the runs go (default: a new folder below results/runs)
set -euo pipefail

out=${1:-results/runs/demo-$(date -u +%Y%m%dT%H%M%S)}
recipe=(--dataset digits --model small_cnn --world-size 2 --epochs 8 --eval-every 2 --target-accuracy 0.95)
methods=(
    "none native"
    "bf16 native"
    "topk:ratio=0.01 allgather"
    "group_topk:ratio=0.01 ring"
)

# Methods take turns: what slows the machine down for a while hits all of them alike. The first turn trains two seeds:
# runs of one command start at once.
for seeds in 1,2 3; do
    for method in "${methods[@]}"; do
        read -r compressor collective <<<"$method"
        bench run "${recipe[@]}" --compressor "$compressor" --collective "$collective" --seeds "$seeds" --out "$out" >/dev/null
    done
done

bench compare "$out" --baseline none
echo "every run's rows, logs and configuration: $out"
