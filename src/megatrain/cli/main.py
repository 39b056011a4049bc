"""The command line. Nothing heavy is imported here: help, completion and `recipe` answer without loading torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from megatrain import __version__
from megatrain.cli.output import INTERRUPTED, guarded, help_if_alone, usage_failure
from megatrain.cli.recipe_commands import recipes
from megatrain.errors import NotAvailable, UsageError
from megatrain.report.lasting import lasting

app = typer.Typer(
    name="megatrain",
    help="Full fine-tuning of language models far larger than the memory of one GPU.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipes, name="recipe")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
MaybeRecipe = Annotated[
    Optional[str],  # noqa: UP045  # typer reads it at run time
    typer.Argument(metavar="[RECIPE]", help="A recipe file, or the name of a shipped one."),
]
ModelOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", metavar="PATH", help="A model instead of a recipe: hub id or folder."),
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. optimizer.lr=2e-5. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")]


_DTYPES = ("auto", "bf16", "fp16", "fp32")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"megatrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    help_if_alone(context)


@app.command()
def finetune(
    recipe: RecipeArgument,
    overrides: SetOption = [],  # noqa: B006  # typer copies it
    output_dir: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output-dir", metavar="DIR", help="Instead of output.dir."),
    ] = None,
    resume: Annotated[
        str, typer.Option("--resume", metavar="auto|never|PATH", help="Go on from a checkpoint.")
    ] = "never",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check recipe, data, limits and plan; load no weights.")
    ] = False,
    json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Plain lines, and few of them.")] = False,
) -> None:
    """Fine-tune a model as a recipe says."""
    with guarded(json=json) as guard:
        from megatrain.cli import finetune_command

        code = finetune_command.run(
            recipe,
            overrides=overrides,
            output_dir=output_dir,
            resume=resume,
            dry_run=dry_run,
            json=json,
            quiet=quiet,
            guard=guard,
        )
        raise typer.Exit(code)


@app.command()
def data(
    recipe: RecipeArgument,
    rows: Annotated[int, typer.Option("--rows", min=0, help="How many rows to print.")] = 3,
    overrides: SetOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Show what the model will see: rows used, refused and truncated, and where the labels are."""
    with guarded(json=json):
        from megatrain.cli import data_command

        raise typer.Exit(data_command.run(recipe, overrides=overrides, rows=rows, json=json))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A run's folder or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write.")],
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="auto|bf16|fp16|fp32", help="auto: what the source checkpoint had.")
    ] = "auto",
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    with guarded(json=json):
        if dtype not in _DTYPES:
            raise UsageError(f"--dtype must be one of {', '.join(_DTYPES)}, not `{dtype}`")
        from megatrain.cli import export_command

        raise typer.Exit(export_command.run(checkpoint, out=out, dtype=dtype, json=json))


def _not_yet(command: str, *, json: bool) -> None:
    with guarded(json=json):
        raise NotAvailable(f"`megatrain {command}` is not available yet")


@app.command("estimate-memory")
def estimate_memory(
    recipe: MaybeRecipe = None,
    model: ModelOption = None,
    overrides: SetOption = [],  # noqa: B006
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--gpu", metavar="NAME", help="Plan for this GPU, e.g. 'RTX 4090': how fast it is."),
    ] = None,
    vram: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--vram", metavar="SIZE", help="Plan for a GPU of which so much may be taken, e.g. 24GiB."),
    ] = None,
    host: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--host", metavar="SIZE", help="Plan for a machine with so much memory, e.g. 128GiB."),
    ] = None,
    link: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--link", metavar="RATE", help="Host to device, one way, e.g. 25GB/s."),
    ] = None,
    cores: Annotated[Optional[int], typer.Option("--cores", min=1, help="CPU cores of that machine.")] = None,  # noqa: UP045
    largest: Annotated[bool, typer.Option("--max", help="The largest batch, context and model that fit.")] = False,
    json: JsonOption = False,
) -> None:
    """What a run needs of host memory, VRAM and disk, and how fast it will be. Exit code 3 if it does not fit."""
    with guarded(json=json):
        from megatrain.cli import estimate_command

        code = estimate_command.run(
            recipe,
            model=model,
            overrides=overrides,
            gpu=gpu,
            vram=vram,
            host=host,
            link=link,
            cores=cores,
            largest=largest,
            json=json,
        )
        raise typer.Exit(code)


@app.command()
def bench(
    recipe: MaybeRecipe = None,
    model: ModelOption = None,
    overrides: SetOption = [],  # noqa: B006
    steps: Annotated[Optional[int], typer.Option("--steps", min=1, help="How many are measured.")] = None,  # noqa: UP045
    tokens_per_step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--tokens-per-step", min=1, help="Instead of train.batch_size."),
    ] = None,
    baseline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--baseline", metavar="resident,fsdp,deepspeed", help="Others on the same work, for comparison."),
    ] = None,
    baseline_timeout: Annotated[
        int, typer.Option("--baseline-timeout", metavar="SECONDS", min=1, help="For each baseline.")
    ] = 900,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--trace", metavar="FILE", help="Write what ran when, as a Chrome trace."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a few steps on this machine: step time, tok/s, what bounds the step, memory."""
    with guarded(json=json):
        from megatrain.cli import bench_command

        raise typer.Exit(
            bench_command.run(
                recipe,
                model=model,
                overrides=overrides,
                steps=steps,
                tokens_per_step=tokens_per_step,
                baseline=baseline,
                baseline_timeout_s=baseline_timeout,
                trace=trace,
                json=json,
            )
        )


@app.command()
def verify(
    recipe: MaybeRecipe = None,
    model: ModelOption = None,
    overrides: SetOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Prove that streamed and resident training of this architecture are equal. (not available yet)"""
    _not_yet("verify", json=json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...")],
    json: JsonOption = False,
) -> None:
    """One HTML page about one or more runs. (not available yet)"""
    _not_yet("report", json=json)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """What this machine has, how fast it is, and what is slow about it. Takes about ten seconds."""
    with guarded(json=json):
        from megatrain.cli import doctor_command

        raise typer.Exit(doctor_command.run(json=json))


# Typer keeps its own copy of click in some versions and imports it in others; this is the base of either's errors.
_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


def main(arguments: list[str] | None = None) -> None:
    """The entry point. Usage errors, too, end as every other failure does."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.stderr = lasting(sys.stderr)
    try:
        code = typer.main.get_command(app).main(given, prog_name="megatrain", standalone_mode=False)
    except _CLICK_ERROR as error:
        code = usage_failure(error.format_message(), json="--json" in given)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)
