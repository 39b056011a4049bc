"""Estimated against measured memory: a few layers of real shapes, two steps each, every case in a process of its own.

    python benchmarks/memory_check.py                       every case on this machine: JSON lines, then a table
    python benchmarks/memory_check.py --only 7b --only tied those whose name holds one of these words
    python benchmarks/memory_check.py --tiny                small cases, for a machine without a GPU

Each line: settings, planned and measured bytes. Device: what PyTorch reserved and what it had allocated at the peak,
each with the context. Host: the peak of the process's resident memory; what is left to the system is not of the
process and is taken out of the plan. On the CPU the device's part lies in host memory and is counted there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).resolve().parent / "shapes"
STEPS = 2
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A shape with so many layers, and settings of the recipe."""

    name: str
    shape: str
    layers: int
    settings: tuple[str, ...]


def _case(name: str, shape: str, layers: int, *settings: str) -> Case:
    return Case(name, shape, layers, settings)


CASES = (
    _case("0.1B tied, 1k", "smollm2-135m", 30, "data.max_seq_len=1024", "train.batch_size=16"),
    _case("0.1B tied, 8k, bf16 moments", "smollm2-135m", 30, "data.max_seq_len=8192", "train.batch_size=4", "BF16"),
    _case("0.5B tied, 2k, host", "qwen2.5-0.5b", 24, "data.max_seq_len=2048", "train.batch_size=16", "HOST"),
    _case("0.5B tied, 16k", "qwen2.5-0.5b", 24, "data.max_seq_len=16384", "train.batch_size=2"),
    _case("1.5B tied, 4k, bf16 moments", "qwen2.5-1.5b", 28, "data.max_seq_len=4096", "train.batch_size=8", "BF16"),
    _case("3B, 1k, 24 GiB", "qwen2.5-3b", 36, "data.max_seq_len=1024", "train.batch_size=64", "memory.vram=24GiB"),
    _case("7B, 8 layers, 2k, host", "qwen2.5-7b", 8, "data.max_seq_len=2048", "train.batch_size=32", "HOST", "SMALL"),
    _case("7B, 8 layers, 16k", "qwen2.5-7b", 8, "data.max_seq_len=16384", "train.batch_size=2", "memory.vram=40GiB"),
    _case("7B, 8 layers, 1k, all in VRAM", "qwen2.5-7b", 8, "data.max_seq_len=1024", "train.batch_size=16"),
    _case("8B, 6 layers, 4k, bf16 moments", "llama-3.1-8b", 6, "data.max_seq_len=4096", "train.batch_size=8", "BF16"),
    _case("8B, 6 layers, 4k, 24 GiB", "llama-3.1-8b", 6, "data.max_seq_len=4096", "train.batch_size=16", "SMALL"),
    _case("14B, 4 layers, 2k", "qwen2.5-14b", 4, "data.max_seq_len=2048", "train.batch_size=16", "memory.vram=32GiB"),
    _case(
        "3B, 12 layers, 16k, attention kept", "qwen2.5-3b", 12, "data.max_seq_len=16384", "train.batch_size=4", "SMALL"
    ),
    _case("7B, 6 layers, 1k, sliced head", "qwen2.5-7b", 6, "data.max_seq_len=1024", "train.batch_size=64", "TIGHT"),
    _case(
        "0.5B tied, 4k, 8 GiB", "qwen2.5-0.5b", 24, "data.max_seq_len=4096", "train.batch_size=8", "memory.vram=8GiB"
    ),
    _case(
        "1.5B tied, 2k, 16 GiB, host", "qwen2.5-1.5b", 28, "data.max_seq_len=2048", "MORE", "HOST", "memory.vram=16GiB"
    ),
)
TINY = (
    _case("tiny tied", "smollm2-135m", 2, "data.max_seq_len=64", "train.batch_size=4"),
    _case(
        "tiny tied, host, bf16 moments", "smollm2-135m", 2, "data.max_seq_len=64", "train.batch_size=4", "HOST", "BF16"
    ),
)
WORDS = {
    "BF16": "optimizer.state=bf16",
    "HOST": "memory.activations=host",
    "SMALL": "memory.vram=24GiB",
    "TIGHT": "memory.vram=10GiB",
    "MORE": "train.batch_size=32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="for each case")
    parser.add_argument("--child", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(measure(Case(**json.loads(options.child)))))
        return
    cases = [c for c in (TINY if options.tiny else CASES) if not options.only or any(w in c.name for w in options.only)]
    results = [run(replace(c, settings=(*c.settings, *options.settings)), timeout_s=options.timeout) for c in cases]
    print(table([r for r in results if r is not None]))
    sys.exit(0 if all(r is not None for r in results) else 1)


def run(case: Case, *, timeout_s: int) -> dict[str, Any] | None:
    """The case in a process of its own; None, and the reason on stderr, if it fails."""
    command = [sys.executable, __file__, "--child", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"{case.name}: no result after {timeout_s} s", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{case.name}: {done.stderr.strip()[-2000:]}", file=sys.stderr)
        return None
    line = done.stdout.strip().splitlines()[-1]
    print(line, flush=True)
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def measure(case: Case) -> dict[str, Any]:
    """Plan, build, two steps, and what they took."""
    from megatrain.recipe import load_recipe
    from megatrain.report.process import host_peak_bytes
    from megatrain.train.bench import Bench, fill_synthetic, run_steps
    from megatrain.train.bench_tokens import random_tokens
    from megatrain.train.build import build_rooms
    from megatrain.train.model_config import read_config
    from megatrain.train.planning import plan_run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "check.yaml")
        path.write_text(
            f"model: {{path: '{SHAPES / case.shape}', init: random, config: {{num_hidden_layers: {case.layers}}}}}\n"
            "data: {train: synthetic, packing: false}\noutput: {dir: unused}\n"
        )
        recipe = load_recipe(str(path), overrides=[WORDS.get(s, s) for s in case.settings])
    phases = {"imports": _resident()}
    planned = plan_run(recipe, config=read_config(recipe))
    plan = planned.plan
    phases["plan"] = _resident()
    rooms = build_rooms(planned, fill=fill_synthetic)
    phases["store"] = _resident()
    setup = Bench(rooms, random_tokens(planned), recipe.train.max_grad_norm)
    losses = []
    for number in range(1, STEPS + 1):
        losses += [step.loss for step in run_steps(setup, count=1, first=number - 1)]
        phases[f"step {number}"] = _resident()
    rooms.worker.drain()
    planned.device.synchronize()
    reserved, allocated = _device_peaks(planned.device)
    return {
        "case": case.name,
        "settings": list(case.settings),
        "params": planned.model.sizes.params_total,
        "plan": {
            name: getattr(plan, name)
            for name in (
                *("micro_batch", "micro_batches", "seq_len", "slots", "activations", "resident", "kept"),
                *("attention", "head_slices", "expert_groups"),
            )
        },
        "planned_device": plan.device_total,
        "measured_device_reserved": reserved,
        "measured_device_allocated": allocated,
        "planned_host": plan.host_total - plan.host.get("left to the system", 0),
        "measured_host": host_peak_bytes(),
        "by_purpose": {"device": plan.device, "host": plan.host},
        "phases": phases,
        "losses": losses,
    }


def _resident() -> dict[str, int]:
    """Resident memory of this process by kind, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = (line.split() for line in lines if line.startswith(("RssAnon", "RssFile", "RssShmem")))
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in found}


def _device_peaks(device: Any) -> tuple[int | None, int | None]:
    """(reserved, allocated) at the peak with the context; None on the CPU."""
    from megatrain.stream.device_probe import allocated_peak_bytes

    if device.torch_device.type != "cuda":
        return None, None
    return device.memory_peak_bytes(), allocated_peak_bytes(device.torch_device) + device.context_bytes


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: planned, measured, and by how much the measured is more than planned."""
    lines = [
        "| case | device planned | reserved | allocated | host planned | measured |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        device = r["planned_device"]
        cells = [
            r["case"],
            _gib(device),
            _against(r["measured_device_reserved"], planned=device),
            _against(r["measured_device_allocated"], planned=device),
            _gib(r["planned_host"]),
            _against(r["measured_host"], planned=r["planned_host"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _against(measured: int | None, *, planned: int) -> str:
    return "-" if measured is None else f"{_gib(measured)} ({measured / planned - 1:+.1%})"


if __name__ == "__main__":
    main()
