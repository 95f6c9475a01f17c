"""The command `quark energy`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

import quark
from quark_core.api import Query
from quark_energy.records import EnergyRecord

__all__ = ["energy"]


@click.command()
@click.argument("run")
@click.option("-d", "--storage-dir", type=Path, help="Storage root [default: this directory].")
def energy(run: str, storage_dir: Path | None) -> None:
    """Print the energy that each device of RUN has used."""
    session = quark.open_run(run, storage_dir)
    rows = session.open_run.read(EnergyRecord.KIND, Query())
    joules: Counter[str] = Counter()
    for device, used in zip(rows["device"], rows["joules"], strict=True):
        joules[device] += used
    for device, used in sorted(joules.items()):
        click.echo(f"{device}  {used:.1f} J")
    if not joules:
        click.echo("No energy was recorded.")
