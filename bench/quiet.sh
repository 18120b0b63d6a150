#!/bin/sh
# Cost and effect of bounded waiting, on an idle machine, in about 40 minutes:
#
#     bench/quiet.sh OUT [BEFORE]
#
# 1. Tokens/s of all tenants together, in alternation: as configured, and with micro-batches of 8,192 tokens. If BEFORE,
#    a folder with the sources of an earlier version, is given: of that version as well. Promised: within 3 % of either.
# 2. Every bad neighbour (bench neighbour). 3. The fleet with up to 10,000 runs (bench fleet).
# Run from the root of the repository; PYTHON picks the interpreter.
set -eu
out=$(mkdir -p "${1:?a folder for the results}" && cd "$1" && pwd)
before=${2:-}
python=${PYTHON:-.venv/bin/python}
case $python in /*) ;; *) python=$PWD/$python ;; esac

throughput() { # name, sources, micro-batch
    (cd "$2" && PYTHONPATH=client:scheduler:server:workers COTRAIN_MICRO_BATCH_TOKENS=$3 \
        "$python" -m bench through_http --batch 8 --tenants 4,16,64 --steps 3 --repeats 3 --overhead-steps 10 --out "$out/$1")
}

for _ in 1 2 3; do
    throughput now . auto
    throughput of-8192 . 8192
    [ -z "$before" ] || throughput before "$before" auto
done
"$python" - "$out" <<'PYTHON'
import json, statistics, sys
from pathlib import Path

found = {}
for path in Path(sys.argv[1]).glob("*/through_http-*.json"):
    for row in json.loads(path.read_text())["rows"]:
        found.setdefault((path.parent.name, row["tenants"]), []).append(row["tokens_per_s"])
median = {key: statistics.median(values) for key, values in found.items()}
for (name, tenants), rate in sorted(median.items()):
    print(f"{name:8} T={tenants:<3} {rate:7.0f} tokens/s   now / this {median['now', tenants] / rate:.3f}")
PYTHON
PYTHONPATH=client:scheduler:server:workers "$python" -m bench neighbour --seconds 30 --alone-seconds 10 --out "$out"
PYTHONPATH=client:scheduler:server:workers "$python" -m bench fleet --turns 8 --out "$out"
