"""`dsv4 convert` and `dsv4 check`: released checkpoints to W8A8, and either form against its manifest."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from cli.console import one_line_errors
from cli.progress import byte_progress
from dsv4.checkpoint.check import check as check_folder
from dsv4.checkpoint.convert import convert as convert_folder
from dsv4.checkpoint.plan import plan_conversion
from dsv4.checkpoint.quantise import RoundingError
from dsv4.errors import CheckpointError
from serving.tokenizer import Tokenizer

FORMS = {"source": "released source format (FP8 + MXFP4)", "w8a8": "W8A8"}


@one_line_errors
def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint in the released source format.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted conversion.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the plan; config.json alone is enough for that.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Weights converted side by side.")] = min(8, os.cpu_count() or 1),
) -> None:
    """Converts a released checkpoint to W8A8: int8 weights with one scale per row. Interrupt it freely."""
    plan = plan_conversion(source)
    for line in plan.describe():
        typer.echo(line)
    if dry_run:
        return
    begin = time.monotonic()
    with byte_progress("convert", plan.source_totals.nbytes) as advance:
        rounding = convert_folder(plan, out, resume=resume, jobs=jobs, progress=advance)
    typer.echo(rounding_report(rounding))
    typer.echo(f"{out}: {plan.output_totals}, W8A8, {time.monotonic() - begin:.1f} s")


def rounding_report(rounding: dict[str, RoundingError]) -> str:
    """A table: what rounding did to each kind of weight."""
    head = f"{'rounding error of':24} {'matrices':>8} {'max':>9} {'rms':>9} {'rms/rms':>8} {'saturated':>9} {'zero rows':>9} {'floored':>8}"
    rows = [
        f"{kind:24} {a.matrices:>8,} {a.max_error:>9.2e} {a.rms_error:>9.2e} {a.relative_rms_error:>8.2%} "
        f"{a.saturated_rows:>9,} {a.zero_rows:>9,} {a.floored_rows:>8,}"
        for kind, a in rounding.items()
    ]
    return "\n".join([head, *rows])


@one_line_errors
def check(
    folder: Annotated[Path, typer.Argument(help="A checkpoint in source format or W8A8.", show_default=False)],
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Read every value, or only names, dtypes and shapes.")
    ] = True,
) -> None:
    """Checks names, dtypes, shapes and values of a checkpoint, and its tokenizer.

    One line per problem, exit code 1 if there is any.
    """
    result = check_folder(folder, values=values)
    problems = [*result.problems, *_tokenizer_problems(folder)]
    for problem in problems:
        typer.echo(problem)
    verdict = f"{len(problems):,} problems" if problems else "no problems"
    typer.echo(f"{folder}: {FORMS[result.form]}, expected {result.totals}: {verdict}")
    if problems:
        raise typer.Exit(1)


def _tokenizer_problems(folder: Path) -> list[str]:
    """Weights are of no use to `generate` and `serve` without the vocabulary they were trained on."""
    try:
        Tokenizer.load(folder)
    except CheckpointError as error:
        return [str(error)]
    return []
