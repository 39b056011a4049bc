"""Everything that benchmarks/h200.md tells, measured section by section. Run from the top of the repository.

    python benchmarks/h200_session.py --list
    python benchmarks/h200_session.py --out DIR --limit 580 --sections adamw,3b-64k,3b-16k
    python benchmarks/h200_session.py --out DIR --limit 580 --sections 7b-64k,7b-16k

Each command has a limit of time of its own, cut to what is left of --limit; one that fails or is too slow is written
down as such and the next begins. DIR gets raw.txt (every command with its output), summary.md (a line for each) and
results.json (the JSON objects), written anew after every command, and what the sections write themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timed import TIMED_OUT, Done, run_timed

PYTHON = sys.executable
LEAST_S = 15
"""A command is not begun with less time left."""
PEERS = "resident,deepspeed,fsdp"


@dataclass(frozen=True)
class Command:
    """One measurement. `words` may hold {out} and {left}: the folder, and the seconds that it has."""

    name: str
    words: tuple[str, ...]
    limit_s: float


def python(name: str, *words: str, limit_s: float) -> Command:
    return Command(name, (PYTHON, *words), limit_s)


def bench(name: str, target: Sequence[str], *words: str, limit_s: float) -> Command:
    return python(name, "-m", "megatrain", "bench", *target, "--json", *words, limit_s=limit_s)


def shape(name: str, *, tokens: int) -> tuple[str, ...]:
    return ("--model", f"benchmarks/shapes/{name}", "--tokens-per-step", str(tokens))


def ceiling(vram: str) -> tuple[str, ...]:
    return ("--set", f"memory.vram={vram}")


def against(peers: str) -> tuple[str, ...]:
    return ("--baseline", peers, "--baseline-timeout", "180")


B3, B7, SMALL, CHATS = "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-0.5b", ("benchmarks/chats.yaml",)
K64, K16 = 65_536, 16_384
BF16 = ("--set", "optimizer.state=bf16")
APART = ("--set", "data.packing=false")
FOUR_LAYERS = (*shape("mixtral-8x7b", tokens=K64), "--set", "model.config.num_hidden_layers=4")
LONG = ("--set", "model.config.num_hidden_layers=2", "--set", "data.max_seq_len=524288")

SECTIONS: dict[str, tuple[Command, ...]] = {
    "adamw": (
        python("AdamW on the CPU", "benchmarks/adamw_bench.py", limit_s=150),
        python("AdamW, bits of every path", "benchmarks/adamw_bench.py", "--check", limit_s=60),
    ),
    "3b-64k": (bench("3B, 64k tokens", shape(B3, tokens=K64), *ceiling("24GiB"), *against(PEERS), limit_s=400),),
    "3b-16k": (bench("3B, 16k tokens", shape(B3, tokens=K16), *ceiling("24GiB"), *against(PEERS), limit_s=300),),
    "7b-64k": tuple(
        bench(f"7B, 64k tokens, {vram}", shape(B7, tokens=K64), *ceiling(vram), "--steps", "3", limit_s=150)
        for vram in ("24GiB", "13GiB", "10GiB")
    ),
    "7b-64k-auto": (bench("7B, 64k tokens, auto", shape(B7, tokens=K64), "--steps", "3", limit_s=150),),
    "7b-16k": (
        bench("7B, 16k tokens, 24 GiB", shape(B7, tokens=K16), *ceiling("24GiB"), limit_s=120),
        bench("7B, 16k tokens, 24 GiB, bf16 moments", shape(B7, tokens=K16), *ceiling("24GiB"), *BF16, limit_s=120),
        bench("7B, 16k tokens, auto", shape(B7, tokens=K16), limit_s=120),
    ),
    "7b-peers": (
        bench("7B, 64k tokens, peers", shape(B7, tokens=K64), *ceiling("24GiB"), *against(PEERS), limit_s=500),
    ),
    "small": (
        bench("0.5B, 64k tokens, auto", shape(SMALL, tokens=K64), *against("resident"), limit_s=120),
        bench("0.5B, 16k tokens, auto", shape(SMALL, tokens=K16), *against("resident"), limit_s=120),
    ),
    "mixture": tuple(
        bench(f"4 layers of Mixtral, {vram}", FOUR_LAYERS, *ceiling(vram), limit_s=100) for vram in ("24GiB", "10GiB")
    ),
    "512k": (
        bench(
            "2 layers of 7B, one row of 512k tokens",
            shape(B7, tokens=524_288),
            *LONG,
            *APART,
            *("--steps", "1"),
            limit_s=200,
        ),
    ),
    "packing": (
        bench("chats, packed", CHATS, limit_s=90),
        bench("chats, one to a row", CHATS, *APART, limit_s=90),
        bench(
            "chats, one to a row, as many tokens a step and at once",
            CHATS,
            *APART,
            *("--set", "train.batch_size=600", "--set", "memory.micro_batch=150"),
            limit_s=90,
        ),
    ),
    "trace": (
        bench(
            "3B, 64k tokens, traced",
            shape(B3, tokens=K64),
            *ceiling("24GiB"),
            *("--steps", "1", "--trace", "{out}/trace-3b-64k.json"),
            limit_s=90,
        ),
    ),
    "sweep": (
        python(
            "sweep",
            "benchmarks/sweep.py",
            *("--model", f"benchmarks/shapes/{B3}", *ceiling("24GiB"), "--steps", "2"),
            *("--budget", "{left}", "--out", "{out}"),
            limit_s=480,
        ),
    ),
    "memory": (python("memory against the estimate", "benchmarks/memory_check.py", limit_s=300),),
    "smoke": (  # on any machine: that sections, limits and files work
        bench(
            "tiny",
            ("--model", "src/megatrain/assets/kjv-tiny", "--tokens-per-step", "128"),
            *("--set", "data.max_seq_len=64", "--set", "memory.device=cpu", "--steps", "1"),
            limit_s=60,
        ),
        python("fails", "-c", "raise SystemExit('as it should')", limit_s=10),
        python("is too slow", "-c", "import time; time.sleep(60)", limit_s=1),
    ),
}
USUAL = tuple(name for name in SECTIONS if name not in ("smoke", "7b-peers", "512k"))


@dataclass
class Record:
    """What was measured so far, and its files in `out`."""

    out: Path
    results: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def note(self, name: str, text: str) -> None:
        self.lines.append(f"* **{name}**: {text}")
        (self.out / "summary.md").write_text("\n".join(self.lines) + "\n")
        print(self.lines[-1], flush=True)

    def keep(self, command: Command, done: Done) -> None:
        words = " ".join("python" if word == PYTHON else word for word in done.command)
        ended = "ended at its limit" if done.code == TIMED_OUT else f"exit code {done.code}"
        with (self.out / "raw.txt").open("a") as raw:
            raw.write(f"### {command.name}: {ended}, {done.seconds:.1f} s\n$ {words}\n{done.stderr}{done.stdout}\n")
        found = last_object(done.stdout)
        if found is not None:
            self.results[command.name] = found
            (self.out / "results.json").write_text(json.dumps(self.results))
        self.note(command.name, summary(found) if found and done.code == 0 else f"{ended}; {last_words(done)}")


def last_object(stdout: str) -> dict[str, Any] | None:
    """The JSON object on the last line, if there is one."""
    lines = stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        return None
    try:
        found = json.loads(lines[-1])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def last_words(done: Done) -> str:
    for stream in (done.stderr, done.stdout):
        lines = [line for line in stream.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error")]
        if lines:
            return (errors or lines)[-1][:200]
    return "it said nothing"


def summary(found: dict[str, Any]) -> str:
    """One line of a benchmark's JSON; of other objects their scalars."""
    if "tokens_per_s" not in found:
        return ", ".join(f"{key} {value}" for key, value in found.items() if isinstance(value, int | float | str))[:300]
    peers = [
        f"{peer['name']} {peer['tokens_per_s']:,.0f} ({peer['ratio']:.2f} x)"
        if peer["failure"] is None
        else f"{peer['name']}: {peer['failure']}"
        for peer in found.get("baselines", ())
    ]
    light = "" if found["light_share"] is None else f", {found['light_share']:.0%} of light ({found['light_by']})"
    predicted = "" if found["estimate"] is None else f", predicted {found['estimate']['step_s']:.3f} s"
    spare = "".join(f", {found[key]} {key}" for key in ("resident", "kept") if found[key])
    return (
        f"{found['step_s']:.3f} s, {found['tokens_per_s']:,.0f} tok/s, {found['tflops']:.0f} TFLOP/s, "
        f"held by {found['bound_by']}{light}{predicted}; update {found['optimizer_s']:.3f} s, exposed "
        f"{found['exposed_optimizer_s']:.3f} + {found['exposed_transfer_s']:.3f} s; "
        f"VRAM {found['vram_peak_bytes'] / 2**30:.1f} GiB (planned {found['vram_planned_bytes'] / 2**30:.1f}), "
        f"host {found['host_peak_bytes'] / 2**30:.1f} GiB ({found['host_bytes_per_parameter']:.2f} B/parameter); "
        f"{found['micro_batches']} x {found['micro_batch']}{spare}" + "".join(f"; {peer}" for peer in peers)
    )


def _filled(word: str, *, values: dict[str, str]) -> str:
    for key, value in values.items():
        word = word.replace(key, value)
    return word


def run(sections: Sequence[str], *, out: Path, limit_s: float) -> Record:
    """Measure one section after another until the time is used."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    record = Record(out)
    for section in sections:
        for command in SECTIONS[section]:
            left_s = min(command.limit_s, deadline - time.monotonic())
            if left_s < min(LEAST_S, command.limit_s):
                record.note(command.name, "left out: no time")
                continue
            here = {"{out}": str(out), "{left}": str(int(left_s) - 5)}
            words = [_filled(word, values=here) for word in command.words]
            record.keep(command, run_timed(words, limit_s=left_s))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the sections with their limits")
    parser.add_argument("--sections", default=",".join(USUAL), help="names with commas between them, in this order")
    parser.add_argument("--skip", default="", help="names to leave out")
    parser.add_argument("--out", type=Path, default=Path("runs/h200"), metavar="DIR")
    parser.add_argument("--limit", type=float, default=580, metavar="SECONDS", help="for everything")
    given = parser.parse_args()
    if given.list:
        for name, commands in SECTIONS.items():
            print(f"{name:12} {sum(c.limit_s for c in commands):5.0f} s  {', '.join(c.name for c in commands)}")
        return
    skipped = given.skip.split(",")
    wanted = [name for name in given.sections.split(",") if name and name not in skipped]
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}")
    run(wanted, out=given.out, limit_s=given.limit)


if __name__ == "__main__":
    main()
