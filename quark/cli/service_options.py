"""What the commands of the persistence service share."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from quark.cli.options import option
from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from quark_backends.service.server.deployment import Deployment

# The server's default; naming it here spares every command the server's imports.
_DEFAULT_STORE = "sqlite:///quark-service/service.db"


STORE = option(
    "Database of the server: sqlite:///PATH or postgresql+psycopg://USER@HOST/DATABASE.",
    metavar="URL",
    envvar="QUARK_SERVE_STORE",
    show_envvar=True,
    default=_DEFAULT_STORE,
)
ARTIFACTS = option(
    "Folder of artifact files, as the server is configured.",
    metavar="URL",
    envvar="QUARK_SERVE_ARTIFACTS",
    show_envvar=True,
    default="",
    show_default="beside a SQLite database",
)


def require_service() -> None:
    """Refuse to go on where the service's packages are missing, or this system cannot run it.

    Raises:
        SessionStoreError: It says what to do.
    """
    if os.open not in os.supports_dir_fd:
        raise SessionStoreError(
            "the Quark server runs on Linux and macOS only. This machine can log to a server: "
            "set QUARK_PERSISTENCE_URL."
        )
    try:
        import httptools  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise SessionStoreError(
            f'the Quark server needs {error.name}: `pip install "quark-tracker[service]"`.'
        ) from None


def make_files_private() -> None:
    """Have what the command makes from now on belong to its user alone."""
    before = os.umask(0o077)
    click.get_current_context().call_on_close(partial(os.umask, before))


def open_deployment(store: str, *, artifacts: str = "", make: bool = False) -> Deployment:
    """The databases of a service.

    Args:
        store: Their URL.
        artifacts: Where payloads lie, for what needs them; empty for where they do by default.
        make: Whether a SQLite store that is not there will be made.

    Raises:
        SchemaValidationError: A URL that no service can have.
        SessionStoreError: There is no such store, or PostgreSQL's driver is missing.
    """
    require_service()
    from quark_backends.service.server.config import ServiceConfig
    from quark_backends.service.server.deployment import Deployment

    make_files_private()
    config = ServiceConfig(store_url=store, artifact_url=artifacts)
    try:
        deployment = Deployment(config)
        if not make:
            deployment.check_exists()
        return deployment
    except ImportError as error:
        raise SessionStoreError(
            f'PostgreSQL needs {error.name}: `pip install "quark-tracker[postgres]"`.'
        ) from None
