"""`quark backends`: what is installed, what it can do, and what was left out and why."""

from __future__ import annotations

import warnings

import click

from quark.cli.store_access import json_option, print_json

__all__ = ["backends"]


@click.command()
@json_option
def backends(as_json: bool) -> None:
    """List the storage backends, and the plugins that were left out."""
    from quark_core.registry import default_registry

    with warnings.catch_warnings():
        # The table says the same, in its place.
        warnings.simplefilter("ignore", RuntimeWarning)
        registry = default_registry()
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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("what it is, and what it can do")
    table.add_column("ranks", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for definition in registry.definitions:
        can = ", ".join(["write", *sorted(definition.capabilities)])
        table.add_row(
            definition.name,
            Text.assemble(definition.summary, (f"\n{can}", "dim")),
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
