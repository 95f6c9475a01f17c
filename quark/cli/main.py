"""Root of the `quark` command: one module per group of commands."""

from __future__ import annotations

import sys
from importlib import import_module
from io import TextIOWrapper

import click

from quark_core.errors import QuarkError
from quark_core.version import __version__

__all__ = ["cli", "main"]

_COMMANDS = {
    "analyze": ("analyze", "Say what is wrong with a run, and how well it does."),
    "artifacts": ("artifacts", "List the artifacts of a run, or copy them out."),
    "backends": ("backends", "List the storage backends and plugins, or begin one."),
    "compare": ("compare", "Say what differs between runs, and whether it matters."),
    "db": ("service_databases", "Migrate the databases of a persistence service."),
    "doctor": ("doctor", "Say what waits, is refused or is damaged."),
    "du": ("usage", "Say what takes up the disk."),
    "export": ("export", "Write a run to files."),
    "gc": ("removal", "Remove what is in the trash for good."),
    "keys": ("service_keys", "Make, list, rotate and revoke keys of a persistence service."),
    "mirror": ("mirror", "Say what a run's mirrors have, compare them, fill them."),
    "restore": ("removal", "Put runs back out of the trash."),
    "rm": ("removal", "Put runs into the trash."),
    "runs": ("runs", "List, search and sort runs."),
    "serve": ("serve", "Serve runs to many users and machines."),
    "show": ("show", "Show one run."),
    "sync": ("sync", "Deliver what waits in journals."),
}
"""Name of a command, which its function bears too -> its module, and what it does."""


class _Commands(click.Group):
    """A group whose commands are imported when they are called, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click gives it
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command = getattr(import_module(f"quark.cli.{module}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quark")
def cli() -> None:
    """Look at what your trainings have logged."""


def main() -> None:
    """Entry point: an error of Quark's, or of the system's, is one line and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What a terminal cannot show becomes "?", which is better than no answer.
            stream.reconfigure(errors="replace")
    try:
        cli()
    except BrokenPipeError:
        # The reader (head, less) has left; Python must not complain at its exit.
        sys.stderr.close()
        sys.exit(141)
    except (QuarkError, OSError) as error:
        click.echo(f"quark: {error}", err=True)
        sys.exit(1)
