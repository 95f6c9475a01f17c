"""`quark db`: versions and backups of a persistence service."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path

import click

from quark.cli.backup import describe_backup, keep_going_option, print_lacking
from quark.cli.command_groups import SuggestingGroup
from quark.cli.service_options import artifacts_option, open_deployment, store_option
from quark_backends.store.databases.sqlite import SCHEMA_VERSION


@click.group(cls=SuggestingGroup)
def db() -> None:
    """Migrate, back up or restore a persistence service, or tell its versions."""


@db.command()
@store_option
def upgrade(store: str) -> None:
    """Bring all databases to this version; a newer one is refused and left as it is."""
    with closing(open_deployment(store)) as deployment:
        for name, version in deployment.upgrade().items():
            what = f"workspace {name}" if name else "control"
            click.echo(f"{what}: version {version}")


@db.command()
@store_option
def version(store: str) -> None:
    """Tell the versions of the control database and of this Quark."""
    from quark_backends.service.server.deployment import CONTROL_VERSION

    with closing(open_deployment(store)) as deployment:
        found = deployment.control.read_version()
        workspaces = deployment.control.list_workspaces() if found else []
        click.echo(f"control: version {found}, this Quark has {CONTROL_VERSION}")
        for name in workspaces:
            told = deployment.read_version(name)
            click.echo(f"workspace {name}: version {told}, this Quark has {SCHEMA_VERSION}")


@db.command()
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@store_option
@artifacts_option
@keep_going_option
@click.option("--into", type=click.Path(path_type=Path), hidden=True, help="As DIRECTORY.")
def backup(
    directory: Path | None, store: str, artifacts: str, keep_going: bool, into: Path | None
) -> None:
    """Copy all of a service into DIRECTORY while it runs: keys, runs, payloads of artifacts.

    DIRECTORY must not be there yet; it is there once all is copied and verified.
    `quark backup --verify DIRECTORY` reads it again.
    """
    from quark_backends.service.server.service_backup import back_up_service

    target = directory or into
    if target is None:
        raise click.UsageError("name a folder to make: quark db backup DIRECTORY")
    with closing(open_deployment(store, artifacts=artifacts)) as deployment:
        manifest = back_up_service(deployment, target, keep_going=keep_going)
    click.echo(f"{target}: {describe_backup(manifest)}, verified.")
    print_lacking(manifest)
    click.echo(f"Put it back with: quark db restore {shlex.quote(str(target))} --store URL")


@db.command()
@click.argument("directory", type=click.Path(path_type=Path))
@store_option
@artifacts_option
@click.option(
    "--replace", is_flag=True, help="Let what is there make way: it is renamed, not deleted."
)
def restore(directory: Path, store: str, artifacts: str, replace: bool) -> None:
    """Put the backup in DIRECTORY where the service's store is to be; the server must not run.

    All of the backup is verified first, and each file again where it goes.
    """
    from quark_backends.service.server.service_backup import restore_service

    with closing(open_deployment(store, artifacts=artifacts, make=True)) as deployment:
        restored = restore_service(directory, deployment, replace=replace)
        place = deployment.control.name
    for old, new in restored.aside.items():
        click.echo(f"{old} is now {new}; delete it when nobody misses anything.")
    click.echo(f"{place}: restored, {describe_backup(restored.manifest)}, verified.")
    print_lacking(restored.manifest)
