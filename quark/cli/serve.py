"""`quark serve`: the persistence service."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.service_options import require_service

if TYPE_CHECKING:
    from quark_backends.service.server.config import ServiceConfig
    from quark_backends.service.server.deployment import Deployment

__all__ = ["serve"]


@click.command()
@click.option("--host", help="Where to listen [default: 127.0.0.1, this machine only].")
@click.option("--port", type=int, help="Port; 0 takes a free one [default: 7411].")
@click.option(
    "--store",
    metavar="URL",
    help="sqlite:///DIR/service.db keeps everything in DIR; "
    "postgresql+psycopg://USER@HOST/DATABASE needs --artifacts too "
    "[default: sqlite:///quark-service/service.db].",
)
@click.option(
    "--artifacts", metavar="URL", help="Folder of payloads [default: beside a SQLite store]."
)
@click.option("--workers", type=int, help="Processes [default: 1].")
@click.option("--migrate", is_flag=True, help="Bring databases of an older version to this one.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="TOML file with the same settings and a table [limits].",
)
@click.option("--show-first-key", is_flag=True, help="Print the first key, terminal or not.")
def serve(config_path: Path | None, migrate: bool, show_first_key: bool, **options: Any) -> None:
    """Serve runs to many users and machines.

    Every setting can be an environment variable too, such as QUARK_SERVE_STORE or
    QUARK_SERVE_LIMITS_BODY_BYTES. A first start makes the workspace `default`, and an
    admin key for it. SIGTERM ends the server once it has finished what it accepted.
    """
    require_service()
    from quark_backends.service.server.deployment import Deployment
    from quark_backends.service.server.process import bind_socket, run_server
    from quark_backends.service.server.settings import load_config

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = load_config(options, os.environ, config_path)
    deployment = Deployment(config)
    try:
        first_key = _prepare(
            deployment, migrate=migrate, show=show_first_key or sys.stdout.isatty()
        )
    finally:
        deployment.close()
    bound = bind_socket(config.host, config.port)
    port = bound.getsockname()[1]
    url = f"http://{_show_host(config.host)}:{port}"
    if not _is_loopback(config.host):
        click.echo(
            f"quark: warning: {config.host} can be reached from other machines, and keys would "
            "cross the network as they are: put a proxy that speaks TLS before this server",
            err=True,
        )
    _tell_key(first_key, url, config)
    click.echo(
        f"Quark serves on {url} (store: {_show_store(config.store_url)}; "
        f"processes: {config.workers}; API: {url}/docs)"
    )
    sys.stdout.flush()
    run_server(config, bound)


def _prepare(deployment: Deployment, *, migrate: bool, show: bool) -> str | None:
    """Make or check the databases; returns the first key of a new server, "" where it is hidden."""
    from quark_backends.service.server.deployment import DEFAULT_WORKSPACE
    from quark_backends.service.server.keys import make_key

    control = deployment.control
    if migrate or control.read_version() == 0:
        deployment.upgrade()
    deployment.check()
    if control.list_workspaces():
        return None
    deployment.add_workspace(DEFAULT_WORKSPACE)
    if not show:
        # Nobody would ever see it.
        return ""
    key, _ = make_key(control, workspace=DEFAULT_WORKSPACE, name="first", scopes=["admin"])
    return key


def _tell_key(key: str | None, url: str, config: ServiceConfig) -> None:
    if key is None:
        return
    if key:
        click.echo("This key is shown once. On the machines that train:")
        click.echo(f"  export QUARK_PERSISTENCE_URL={url}")
        click.echo(f"  export QUARK_USER_KEY={key}")
        return
    click.echo(
        "The workspace `default` is new. Make a key for it with:\n"
        f"  quark keys create --store {_show_store(config.store_url)} --scope admin"
    )


def _show_store(store_url: str) -> str:
    """A store's URL that means the same in every folder, without its password."""
    from quark_backends.service.server.control import parse_store_url

    url = parse_store_url(store_url)
    if url.drivername == "sqlite":
        url = url.set(database=os.path.abspath(url.database or ""))
    return url.render_as_string(hide_password=True)


def _show_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
