"""Where the `dsv4` command begins: an interrupt during imports, which take seconds, ends it quietly too."""

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
