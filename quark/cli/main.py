"""Root of the `quark` command: each command is in the module of its name."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from quark.cli.command_groups import SuggestingGroup
from quark.cli.completion import answer_shell, install_option, is_completing
from quark.cli.terminal import guard_streams
from quark_core.config import settings
from quark_core.errors import QuarkError
from quark_core.version import __version__

__all__ = ["cli", "main"]

_COMMANDS = {
    "analyze": "Say what is wrong with a run, and how well it does.",
    "artifacts": "List artifacts, their versions and lineage, or copy them out.",
    "backends": "List the storage backends and plugins, or begin one.",
    "backup": "Copy a store with all that is in it, or check a copy.",
    "compare": "Say what differs between runs, and whether it matters.",
    "db": "Migrate, back up or restore a persistence service.",
    "doctor": "Say what waits, is refused or is damaged.",
    "du": "Say what takes up the disk.",
    "edit": "Change the name, notes and tags of a run, or archive it.",
    "export": "Write a run to files.",
    "follow": "Follow a run in the terminal while it goes on.",
    "gc": "Remove what is in the trash for good.",
    "groups": "List the groups that runs are in, or say what one is.",
    "import": "Take in runs of TensorBoard, W&B, MLflow and others.",
    "keys": "Make, list, rotate and revoke keys of a persistence service.",
    "logs": "Print what a run has printed, also while it goes on.",
    "mcp": "Serve runs as tools of the Model Context Protocol.",
    "mirror": "Say what a run's mirrors have, compare them, fill them.",
    "report": "Write one HTML file about runs.",
    "restore": "Put runs back out of the trash.",
    "rm": "Put runs into the trash.",
    "runs": "List, search and sort runs.",
    "samples": "List and search the text samples of a run.",
    "serve": "Serve runs to many users and machines.",
    "show": "Show one run.",
    "sources": "Show, compare or restore the code of a run.",
    "stop": "Ask a training to stop.",
    "sweep": "Search the best parameters, with any number of workers.",
    "sync": "Deliver what waits in journals.",
    "traces": "Show the versions of traced functions in a project.",
    "ui": "Look at runs in the browser.",
    "why": "Say why the result of a run is not that of another.",
}
"""Name of a command, which its module and its function bear too -> what it does."""

_MODULES = {"import": "import_runs"}
"""Those whose names Python keeps for itself."""


class _Commands(SuggestingGroup):
    """A group whose commands are imported when they are called, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click gives it
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        name = _MODULES.get(cmd_name, cmd_name)
        command = getattr(import_module(f"quark.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quark")
@install_option
def cli() -> None:
    """Look at what your trainings have logged."""


def main() -> None:
    """Entry point: an error of Quark's, or of the system's, is one line and exit status 1."""
    if is_completing():
        answer_shell(cli)
    guard_streams()
    # A run that a command makes speaks by the command.
    os.environ.setdefault(settings.QUIET, "1")
    try:
        cli()
    except BrokenPipeError:
        # The reader (head, less) has left; Python must not complain at its exit.
        sys.stderr.close()
        sys.exit(141)
    except (QuarkError, OSError) as error:
        click.echo(f"quark: {error}", err=True)
        sys.exit(1)
