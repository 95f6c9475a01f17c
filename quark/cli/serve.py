"""`quark serve`: the persistence service."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.service_options import make_files_private, require_service

if TYPE_CHECKING:
    from quark.cli.workspace_notices import WorkspaceNotices
    from quark_backends.service.server.application import MakePage
    from quark_backends.service.server.config import ServiceConfig
    from quark_backends.service.server.deployment import Deployment


@click.command()
@click.option("--host", help="Address to listen on.", show_default="127.0.0.1")
@click.option("--port", type=int, help="Port to listen on; 0 uses a free one.", show_default="7411")
@click.option(
    "--store",
    metavar="URL",
    help="Database: sqlite:///DIR/service.db, or postgresql+psycopg://USER@HOST/DATABASE with "
    "--artifacts.",
    show_default="sqlite:///quark-service/service.db",
)
@click.option(
    "--artifacts",
    metavar="URL",
    help="Folder of artifact files.",
    show_default="beside a SQLite database",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Host name that clients use, such as a proxy's; * allows all. Repeatable.",
    show_default="the names and addresses of this machine",
)
@click.option("--ui", is_flag=True, default=None, help="Serve the web UI at the same address.")
@click.option(
    "--allow-edit",
    is_flag=True,
    default=None,
    help="Allow keys with the scope write to edit and stop runs.",
)
@click.option(
    "--keep-sources",
    is_flag=True,
    default=None,
    help="Store the source code of runs, without secrets, for all readers of the workspace.",
)
@click.option(
    "--notify",
    metavar="[WORKSPACE=]URL",
    multiple=True,
    help="Notify about runs and alerts: slack://…, mailto://…, webhook+https://… Repeatable.",
)
@click.option(
    "--notify-on",
    metavar="WORDS",
    help="Minimum alert severity and run states to notify about.",
    show_default="error, failed, lost",
)
@click.option("--workers", type=int, help="Number of processes.", show_default="1")
@click.option("--migrate", is_flag=True, help="Upgrade databases of an older version.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="TOML file with the same options and a table [limits].",
)
@click.option(
    "--show-first-key", is_flag=True, help="Print the first key, also if stdout is not a terminal."
)
def serve(config_path: Path | None, migrate: bool, show_first_key: bool, **options: Any) -> None:
    """Run the server for a team.

    You can also set each option as an environment variable, such as
    QUARK_SERVE_STORE or QUARK_SERVE_LIMITS_BODY_BYTES. The first start creates the
    workspace `default` and an admin key. SIGTERM stops the server after it has
    finished the accepted requests.
    """
    require_service()
    make_files_private()
    from quark.page.server import is_loopback, show_host
    from quark_backends.service.server.config import load_config
    from quark_backends.service.server.deployment import Deployment
    from quark_backends.service.server.middleware import find_own_name
    from quark_backends.service.server.process import bind_socket, run_server

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = load_config(options, os.environ, config_path)
    if config.allow_edit and not config.ui:
        raise click.UsageError("--allow-edit requires --ui.")
    deployment = Deployment(config)
    try:
        # A place that cannot be is told before anything is made.
        _ = deployment.payload_root
        first_key = _prepare(
            deployment, migrate=migrate, show=show_first_key or sys.stdout.isatty()
        )
    finally:
        deployment.close()
    notices = _begin_notices(config)
    bound = bind_socket(config.host, config.port)
    port = bound.getsockname()[1]
    url = f"http://{show_host(config.host)}:{port}"
    if not is_loopback(config.host):
        click.echo(
            f"quark: warning: {config.host} is reachable from other machines, and API keys are "
            "sent unencrypted. Put a TLS proxy in front of this server.",
            err=True,
        )
        if not config.allowed_hosts:
            click.echo(
                "quark: clients may use this server's addresses and the name "
                f"{find_own_name(config.host)}. --allowed-host NAME allows another name.",
                err=True,
            )
    _tell_key(first_key, f"http://{show_host(find_own_name(config.host))}:{port}", config)
    click.echo(
        f"Quark serves on {url} (store: {_show_store(config.store_url)}; "
        f"processes: {config.workers}; API: {url}/docs)"
    )
    if config.ui:
        changes = "; keys with the scope write may edit runs" if config.allow_edit else ""
        click.echo(f"Web UI: {url}/ (log in with an API key{changes}).")
    sys.stdout.flush()
    try:
        run_server(config, bound, make_page=_find_page(config))
    finally:
        if notices is not None:
            notices.close()


def _begin_notices(config: ServiceConfig) -> WorkspaceNotices | None:
    if not config.notify:
        return None
    # Late, as the page: only servers that tell anybody have it.
    from quark.cli.workspace_notices import WorkspaceNotices

    notices = WorkspaceNotices(config)
    notices.start()
    return notices


def _find_page(config: ServiceConfig) -> MakePage | None:
    if not config.ui:
        return None
    # Late: what the page needs is only loaded by servers that have one.
    from quark.cli.team_page import make_team_page

    return make_team_page


def _prepare(deployment: Deployment, *, migrate: bool, show: bool) -> str | None:
    """Make or check the databases; returns the first key of a new server, "" where it is hidden."""
    from quark_backends.service.server.deployment import DEFAULT_WORKSPACE
    from quark_backends.service.server.keys import make_key

    control = deployment.control
    if migrate or control.read_version() == 0:
        deployment.upgrade()
    deployment.check()
    for said in deployment.make_private():
        click.echo(f"quark: warning: {said}", err=True)
    if control.list_workspaces():
        return None
    deployment.add_workspace(DEFAULT_WORKSPACE)
    if not show:
        # Nobody would ever see it.
        return ""
    key, _ = make_key(control, workspace=DEFAULT_WORKSPACE, name="operator", scopes=["admin"])
    return key


def _tell_key(key: str | None, url: str, config: ServiceConfig) -> None:
    if key is None:
        return
    create = f"  quark keys create --store {shlex.quote(_show_store(config.store_url))}"
    if key:
        click.echo(
            "Admin key, shown once. It can create and revoke keys: do not store it on\n"
            "training machines.\n"
            f"  {key}"
        )
    else:
        click.echo(f"Created the workspace `default`. Create an admin key:\n{create} --scope admin")
    click.echo(
        "For training jobs, create a key that can only log and read runs:\n"
        f"{create} --name training\n"
        "and on the training machine, set:\n"
        f"  export QUARK_PERSISTENCE_URL={url}\n"
        "  export QUARK_USER_KEY=<the printed key>"
    )


def _show_store(store_url: str) -> str:
    """A store's URL that means the same in every folder, without its password."""
    from quark_backends.service.server.deployment import parse_store_url

    url = parse_store_url(store_url)
    if url.drivername == "sqlite":
        url = url.set(database=os.path.abspath(url.database or ""))
    return url.render_as_string(hide_password=True)
