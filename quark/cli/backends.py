"""`quark backends`: what is installed and what was left out; `new` begins one of one's own."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.command_groups import SuggestingGroup
from quark.cli.store_access import json_option, print_json

if TYPE_CHECKING:
    from quark_core.backends.registry import BackendRegistry


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@json_option
@click.pass_context
def backends(context: click.Context, as_json: bool) -> None:
    """List the storage backends, and the plugins that were left out."""
    if context.invoked_subcommand is None:
        _list(as_json)


@backends.command()
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder in which quark-NAME is made [default: the working directory].",
)
def new(name: str, into: Path) -> None:
    """Write a new backend: a distribution that works, with its tests.

    NAME is what users write in `backends=`; the distribution is called quark-NAME, which
    may be given as well.
    """
    from quark.cli.backend_skeleton import check_backend_name, write_skeleton

    name = check_backend_name(name, _discover())
    target = write_skeleton(name, into)
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        click.echo(f"  {path}")
    click.echo(
        f"This is the backend {name}, in the distribution quark-{name}. Its tests pass as it is:\n"
        f'  cd {shlex.quote(str(target))} && pip install -e ".[test]" && python -m pytest\n'
        "Then put your store in place of the files in backend.py."
    )


def _discover() -> BackendRegistry:
    from quark_core.backends.registry import default_registry

    with warnings.catch_warnings():
        # The table says the same, in its place.
        warnings.simplefilter("ignore", RuntimeWarning)
        return default_registry()


def _list(as_json: bool) -> None:
    registry = _discover()
    if as_json:
        print_json(
            {
                "backends": [
                    {
                        "name": definition.name,
                        "summary": definition.summary,
                        "schemes": list(definition.schemes),
                        "capabilities": sorted(definition.capabilities),
                        "ranks": str(definition.rank_policy),
                        "api_version": definition.api_version,
                        "origin": registry.origin(definition.name),
                    }
                    for definition in registry.definitions
                ],
                "left_out": [
                    {"name": item.name, "origin": item.origin, "reason": item.reason}
                    for item in registry.left_out
                ],
            }
        )
        return

    from rich import box
    from rich.table import Table

    from quark.cli.texts import Console, Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("what it is, and what it can do")
    table.add_column("ranks", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for definition in registry.definitions:
        can = ", ".join(["write", *sorted(definition.capabilities)])
        table.add_row(
            definition.name,
            Text.assemble(definition.summary, Text(f"\n{can}", "dim", lines=True)),
            str(definition.rank_policy),
            registry.origin(definition.name),
        )
    console = Console()
    console.print(table)
    for item in registry.left_out:
        console.print(
            Text.assemble(
                ("left out: ", "yellow"), (item.name, "bold"), f" of {item.origin}: {item.reason}"
            )
        )
