"""`quark db`: versions and backups of a persistence service."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path

import click

from quark.cli.backup import KEEP_GOING, describe_backup, print_lacking
from quark.cli.command_groups import SuggestingGroup
from quark.cli.options import argument, option, takes_options
from quark.cli.service_options import (
    ARTIFACTS,
    STORE,
    open_deployment,
)
from quark_backends.store.databases.sqlite import SCHEMA_VERSION


@click.group(cls=SuggestingGroup)
def db() -> None:
    """Back up, restore or upgrade the server's databases."""


@db.command()
@takes_options
def upgrade(*, store: str = STORE) -> None:
    """Upgrade all databases to this version of Quark.

    A database of a newer version is rejected and is not changed.
    """
    with closing(open_deployment(store)) as deployment:
        for name, version in deployment.upgrade().items():
            what = f"workspace {name}" if name else "control"
            click.echo(f"{what}: version {version}")


@db.command()
@takes_options
def version(*, store: str = STORE) -> None:
    """Show the versions of the server's databases."""
    with closing(open_deployment(store)) as deployment:
        from quark_backends.service.server.deployment import CONTROL_VERSION

        found = deployment.control.read_version()
        workspaces = deployment.control.list_workspaces() if found else []
        click.echo(f"control: version {found}, this Quark has {CONTROL_VERSION}")
        for name in workspaces:
            told = deployment.read_version(name)
            click.echo(f"workspace {name}: version {told}, this Quark has {SCHEMA_VERSION}")


@db.command()
@takes_options
def backup(
    *,
    directory: Path | None = argument(),
    store: str = STORE,
    artifacts: str = ARTIFACTS,
    keep_going: bool = KEEP_GOING,
    into: Path | None = option("Same as DIRECTORY.", hidden=True),
) -> None:
    """Back up the server's databases to DIRECTORY.

    Copies keys, runs and artifact files while the server runs. DIRECTORY must not
    exist. It appears when all files are copied and verified. To check it later, run
    `quark backup --verify DIRECTORY`.
    """
    target = directory or into
    if target is None:
        raise click.UsageError("Missing argument 'DIRECTORY'.")
    with closing(open_deployment(store, artifacts=artifacts)) as deployment:
        from quark_backends.service.server.service_backup import back_up_service

        manifest = back_up_service(deployment, target, keep_going=keep_going)
    click.echo(f"{target}: {describe_backup(manifest)}, verified.")
    print_lacking(manifest)
    click.echo(f"To restore it: quark db restore {shlex.quote(str(target))} --store URL")


@db.command()
@takes_options
def restore(
    *,
    directory: Path = argument(),
    store: str = STORE,
    artifacts: str = ARTIFACTS,
    replace: bool = option("Rename existing databases and files instead of failing."),
) -> None:
    """Restore the server's databases from DIRECTORY.

    Stop the server first. The whole backup is verified before anything is written,
    and each file again after it is written.
    """
    with closing(open_deployment(store, artifacts=artifacts, make=True)) as deployment:
        from quark_backends.service.server.service_backup import restore_service

        restored = restore_service(directory, deployment, replace=replace)
        place = deployment.control.name
    for old, new in restored.aside.items():
        click.echo(f"Renamed {old} to {new}. Delete it when you no longer need it.")
    click.echo(f"{place}: restored, {describe_backup(restored.manifest)}, verified.")
    print_lacking(restored.manifest)
