#!/usr/bin/env bash
# One run per learning rate, then a table, best first. An interrupted sweep goes on where it stopped.
#   recipes/sweep.sh quickstart runs/sweep 3e-4 1e-3 3e-3
set -euo pipefail
if (($# < 3)); then
    echo "usage: $0 RECIPE FOLDER LEARNING_RATE..." >&2
    exit 2
fi
recipe=$1 folder=$2
shift 2

for lr in "$@"; do
    megatrain finetune "$recipe" --set optimizer.lr="$lr" --output-dir "$folder/lr-$lr" --resume auto --quiet
done

python3 - "$folder" <<'PYTHON'
import json, pathlib, sys

found = [(json.loads(path.read_text()), path.parent.name) for path in pathlib.Path(sys.argv[1]).glob("*/run.json")]
runs = [run for run in found if run[0].get("last_loss") is not None]
# Without held-out data the last training loss has to do.
runs.sort(key=lambda run: run[0]["last_loss"] if run[0]["eval_loss"] is None else run[0]["eval_loss"])
print(f"{'run':<16}{'eval loss':>10}{'last loss':>11}{'tok/s':>9}")
for summary, name in runs:
    shown = "-" if summary["eval_loss"] is None else f"{summary['eval_loss']:.4f}"
    print(f"{name:<16}{shown:>10}{summary['last_loss']:>11.4f}{summary['tokens_per_s'] or 0:>9.0f}")
for summary, name in found:
    if summary["status"] != "done":
        print(f"{name}: {summary['status']}")
PYTHON
