"""Root of the `quark` command: one module per group of commands."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from quark.cli.backends import backends
from quark.cli.doctor import doctor
from quark.cli.export import export
from quark.cli.removal import gc, restore, rm
from quark.cli.runs import runs
from quark.cli.show import show
from quark.cli.sync import sync
from quark.cli.usage import du
from quark_core.errors import QuarkError
from quark_core.version import __version__

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quark")
def cli() -> None:
    """Look at what your trainings have logged."""


cli.add_command(backends)
cli.add_command(runs)
cli.add_command(doctor)
cli.add_command(export)
cli.add_command(show)
cli.add_command(sync)
cli.add_command(du)
cli.add_command(rm)
cli.add_command(restore)
cli.add_command(gc)


def main() -> None:
    """Entry point: an error of Quark's is one line on stderr and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What a terminal cannot show becomes "?", which is better than no answer.
            stream.reconfigure(errors="replace")
    try:
        cli()
    except QuarkError as error:
        click.echo(f"quark: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (head, less) has left; Python must not complain at its exit.
        sys.stderr.close()
        sys.exit(141)
