"""An estimate for people: a bar of each memory, a table by purpose, what was decided, assumed and advised."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.report.console import colours
from megatrain.train.estimate import Estimate
from megatrain.units import format_size

BAR = 60
SHADES = ("█", "▓", "▒", "░")
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
NOTHING_FITS = "none: not even the least fits"
SMALL = 1 << 20
"""Purposes below it are summed up."""


def show(found: Estimate) -> None:
    """Print it on stdout; without a terminal as plain lines."""
    coloured = colours(sys.stdout)
    console = Console(
        file=sys.stdout,
        width=None if coloured else 110,
        no_color=not coloured,
        force_terminal=coloured,
        highlight=False,
    )
    plan, sizes = found.plan, found.structure.facts.sizes
    verdict = "fits" if found.fits else "does not fit"
    console.print(
        Text(f"{found.recipe.model.path}: {_count(sizes.params_total)} parameters, {verdict}", "bold"), soft_wrap=True
    )
    _part(console, "host memory", found.host, limit=plan.host_limit.bytes, source=plan.host_limit.source)
    device = plan.device_limit
    title = "device" if not plan.on_cpu else "compute, in host memory"
    _part(
        console,
        title,
        plan.device,
        limit=None if device is None else device.bytes,
        source="" if device is None else device.source,
    )
    _part(console, "disk", found.disk, limit=found.machine.disk_free_bytes, source="free where output.dir is")
    speed = found.speed
    console.print(
        f"about {speed.tokens_per_s:,.0f} tok/s, {speed.step_s:.2f} s a step, bound by {speed.bound_by}", soft_wrap=True
    )
    for title, lines in (("decided", found.explanation), ("assumed", found.assumed), ("advice", found.advice)):
        for line in lines:
            console.print(Text(f"{title}: ", "dim") + Text(line), soft_wrap=True)
    if found.largest is not None:
        largest = found.largest
        console.print(Text("the largest that fits, each alone", "bold"))
        counts = {"micro_batch": "micro-batch", "batch_size": "batch", "max_seq_len": "context"}
        for name, title in counts.items():
            most = getattr(largest, name)
            said = f"{most:,}: {largest.how[name]}" if most else NOTHING_FITS
            console.print(f"  {title} {said}", soft_wrap=True)
        shape = f"{largest.model_layers} layers, hidden {largest.model_hidden}"
        model = f"{_count(largest.model_params)} ({shape}): {largest.how['model']}"
        console.print(f"  model {model if largest.model_params else NOTHING_FITS}", soft_wrap=True)


def _part(console: Console, title: str, purposes: Mapping[str, int], *, limit: int | None, source: str) -> None:
    total = sum(purposes.values())
    of = "" if limit is None else f" of {format_size(limit)} ({source})"
    console.print()
    console.print(Text(f"{title}: {format_size(total)}{of}", "bold"), soft_wrap=True)
    large = {name: size for name, size in purposes.items() if size >= SMALL}
    rest = total - sum(large.values())
    if rest:
        large["other"] = rest
    console.print(_bar(large, room=max(limit or 0, total)))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for index, (name, size) in enumerate(sorted(large.items(), key=lambda item: -item[1])):
        mark = Text(SHADES[index % len(SHADES)], COLOURS[index % len(COLOURS)])
        table.add_row(mark + Text(f" {name}", "default"), format_size(size), f"{size / max(total, 1):.0%}")
    console.print(table)


def _bar(purposes: Mapping[str, int], *, room: int) -> Text:
    """Each purpose as wide as its share of what there is; the rest is free."""
    bar, done, drawn = Text("["), 0, 0
    for index, (_, size) in enumerate(sorted(purposes.items(), key=lambda item: -item[1])):
        done += size
        width = round(BAR * done / max(room, 1)) - drawn
        bar.append(SHADES[index % len(SHADES)] * width, COLOURS[index % len(COLOURS)])
        drawn += width
    bar.append("·" * (BAR - drawn), "dim")
    bar.append("]")
    return bar


def _count(parameters: int) -> str:
    """'1.05 M', '8.03 B'."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
