"""`quark db`: versions and copies of a persistence service's databases."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from quark.cli.service_options import open_deployment, store_option

__all__ = ["db"]


@click.group()
def db() -> None:
    """Migrate or copy the databases of a persistence service, or tell their versions."""


@db.command()
@store_option
def upgrade(store: str) -> None:
    """Bring all databases to this version; a newer one is refused and left as it is."""
    with closing(open_deployment(store, make=True)) as deployment:
        for name, version in deployment.upgrade().items():
            what = f"workspace {name}" if name else "control"
            click.echo(f"{what}: version {version}")


@db.command()
@store_option
def version(store: str) -> None:
    """Tell the versions of the control database and of this Quark."""
    from quark_backends.service.server.control_tables import CONTROL_VERSION
    from quark_backends.store.database import SCHEMA_VERSION

    with closing(open_deployment(store)) as deployment:
        found = deployment.control.read_version()
        workspaces = deployment.control.list_workspaces() if found else []
        click.echo(f"control: version {found}, this Quark has {CONTROL_VERSION}")
        for name in workspaces:
            told = deployment.read_version(name)
            click.echo(f"workspace {name}: version {told}, this Quark has {SCHEMA_VERSION}")


@db.command()
@store_option
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to make; it must not be there yet.",
)
def backup(store: str, into: Path) -> None:
    """Copy the databases of a SQLite store, each as of one moment, while they are written.

    Payloads of artifacts are files: copy their folder afterwards.
    """
    with closing(open_deployment(store)) as deployment:
        for path in deployment.back_up(into):
            click.echo(f"{path}: {path.stat().st_size:,} bytes")
        click.echo(f"Payloads are not among them; copy {deployment.payload_root} now.")
