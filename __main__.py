"""The console command `onediff-guard`, and `python -m comfyui_onediff_guard`: headless/'s subcommands, and the demo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .headless.commands import cli

DEMO = cli.Subcommand(
    "demo",
    "make a small model and show what the guard does with it",
    lambda: import_module(".demo.command", __package__),
)
SUBCOMMANDS = (*cli.SUBCOMMANDS[:3], DEMO, *cli.SUBCOMMANDS[3:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code; see `ExitCode`."""
    return cli.main(argv, SUBCOMMANDS)


if __name__ == "__main__":
    sys.exit(main())
