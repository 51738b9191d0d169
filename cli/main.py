"""The `dsv4` command: registers commands, nothing else."""

import typer

from cli.bench import bench
from cli.console import one_line_errors
from cli.convert import check, convert
from cli.generate import generate
from cli.profile import profile
from cli.serve import serve
from cli.tiny import make_tiny

app = typer.Typer(
    name="dsv4",
    help="DeepSeek-V4-Flash with the DSpark drafter: pure functions, static graphs.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, generate, convert, check, make_tiny, profile, bench):
    app.command()(one_line_errors(command))
