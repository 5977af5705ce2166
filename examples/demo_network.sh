#!/usr/bin/env bash
# Four virtual hosts with a 100 Mbit/s link each, ResNet-18: how long a step takes dense and compressed, and what is sent.
#
#   examples/demo_network.sh [OUT]      OUT: where the runs go (default: a new folder below results/runs)
set -euo pipefail

out=${1:-results/runs/demo-network-$(date -u +%Y%m%dT%H%M%S)}
recipe=(--hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --train-size 512 --test-size 64 --batch-size 4
    --warmup-steps 3)
# A dense step takes six seconds here, one through a single server thirteen, so these methods make fewer of them.
methods=(
    "none native 7"
    "bf16 native 9"
    "group_topk:ratio=0.01 ring 15"
    "group_topk:ratio=0.01 allgather 15"
    "hylo server 5"
    "powersgd native 15"
)

for method in "${methods[@]}"; do
    read -r compressor collective steps <<<"$method"
    bench run "${recipe[@]}" --steps "$steps" --compressor "$compressor" --collective "$collective" --out "$out" >/dev/null
done

bench compare "$out" --by compressor,collective --metric step_time_s
echo "every run's rows, logs and configuration: $out"
