"""What the commands of the persistence service share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from quark_backends.service.server.deployment import Deployment

__all__ = ["open_deployment", "require_service", "store_option"]

F = TypeVar("F", bound=Callable[..., Any])

_STORE = "QUARK_SERVE_STORE"
# The server's default; naming it here spares every command the server's imports.
_DEFAULT_STORE = "sqlite:///quark-service/service.db"


def store_option(command: F) -> F:
    """Add --store to a command."""
    return click.option(
        "--store",
        metavar="URL",
        envvar=_STORE,
        show_envvar=True,
        default=_DEFAULT_STORE,
        show_default=True,
        help="Store of the service: sqlite:///PATH or postgresql+psycopg://USER@HOST/DATABASE.",
    )(command)


def require_service() -> None:
    """Refuse to go on where the service's packages are missing.

    Raises:
        SessionStoreError: They are; it says how to install them.
    """
    try:
        import httptools  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SessionStoreError(
            f"{error.name} is missing, which the persistence service needs: "
            'pip install "quark-tracker[service]"'
        ) from None


def open_deployment(store: str, *, make: bool = False) -> Deployment:
    """The databases of a service.

    Args:
        store: Their URL.
        make: Whether a SQLite store that is not there will be made.

    Raises:
        SchemaValidationError: A URL that no service can have.
        SessionStoreError: There is no such store, or PostgreSQL's driver is missing.
    """
    from quark_backends.service.server.config import ServiceConfig
    from quark_backends.service.server.deployment import Deployment

    require_service()
    # Where payloads lie matters to the server only.
    config = ServiceConfig(store_url=store, artifact_url=os.curdir)
    try:
        deployment = Deployment(config)
        if not make:
            deployment.check_exists()
        return deployment
    except ImportError as error:
        raise SessionStoreError(
            f"{error.name} is missing, which PostgreSQL needs: "
            'pip install "quark-tracker[postgres]"'
        ) from None
