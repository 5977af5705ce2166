#!/usr/bin/env bash
# Does compressing gradients make training finish sooner, on a slow link, without losing accuracy? Real handwritten digits on two
# hosts with a 50 Mbit/s link, five methods, three seeds; then the table, a picture and a report. The runs: examples/demo.toml.
#
#   examples/demo.sh [OUT]      OUT: where everything goes (default: a new folder below results/runs)
set -euo pipefail

out=${1:-results/runs/demo-$(date -u +%Y%m%dT%H%M%S)}
runs=$(dirname "$0")/demo.toml

may_have_hosts='
import sys
from bench.hosts.support import hosts_supported

supported, reason = hosts_supported()
sys.exit(0 if supported else reason)
'
if ! python -c "$may_have_hosts"; then
    cat >&2 <<'WHY'
So there are no virtual hosts with a slow link here, and the two ranks talk through this machine's memory instead. Bytes and
accuracy are those of a real link. Times are not: where the link costs nothing, compression can only cost time.
WHY
    on_loopback=$(mktemp --suffix=.toml)
    trap 'rm -f "$on_loopback"' EXIT
    sed '/^hosts\|^bandwidth/d' "$runs" >"$on_loopback"
    runs=$on_loopback
fi

bench sweep "$runs" --out "$out"
bench compare "$out" --metric time_to_target_s
bench plot accuracy-time "$out" --out "$out/accuracy-time.svg"
bench report "$out" --out "$out/report.html"
echo "every run's rows, logs and configuration: $out"
