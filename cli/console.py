"""How commands speak: one line for an error, progress that suits the terminal, tables."""

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dsv4.errors import Dsv4Error

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns expected failures into one line on stderr and exit code 1."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Dsv4Error as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except BrokenPipeError:  # whoever read our output has left; typer knows what to do
            raise
        except OSError as error:  # a path that is a file, a full disk, a folder without permission
            where = f"{error.filename}: " if error.filename else ""
            typer.echo(f"error: {where}{error.strerror or error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapper


def log_to_stderr(level: int = logging.INFO) -> None:
    """Plain log lines on stderr, for servers."""
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")


@contextmanager
def stage_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, a line every two seconds elsewhere; yields report(what, done, total)."""
    if err.is_terminal:
        with Progress(
            TextColumn(f"{title}: {{task.description}}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
        ) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        return
    last = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 2 or done == total:
            last = now
            typer.echo(f"{title}: {what} {done}/{total}", err=True)

    yield report
