"""Where a server keeps everything: control database, stores of workspaces, payloads."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.workspaces.control_database import (
    ControlDatabase,
    check_workspace,
)
from quark_core.errors import SchemaValidationError, SessionStoreError, StoreNotFoundError
from quark_core.records import format_time
from quark_core.records.base import now_us

if TYPE_CHECKING:
    from quark_backends.service.server.workspaces.stores import WorkspaceStore
    from quark_backends.store.databases.postgres import PostgresDatabase
    from quark_backends.store.databases.postgres_pool import PostgresPool

DEFAULT_WORKSPACE = "default"
"""The workspace that a new server has."""

_CONNECTIONS = 40
_OTHERS = 0o077


class Deployment:
    """The databases and folders that a configuration names; from any thread.

    SQLite: `sqlite:///DIR/service.db` is the control database, and each workspace
    has a storage root `DIR/workspaces/NAME`. PostgreSQL: the control database is
    the schema `quark_control`, and each workspace the schema `quark_ws_NAME`.

    Attributes:
        control: The control database.
        folder: Where a SQLite store lies.
        schema_prefix: Begins the names of workspaces' schemas in PostgreSQL.

    Raises:
        SchemaValidationError: A URL that a server cannot have.
    """

    schema_prefix = "quark_ws_"

    def __init__(self, config: ServiceConfig) -> None:
        self.control = ControlDatabase(config.store_url)
        self._chose_payloads = not config.artifact_url
        self.folder = self.control_path.parent
        self._artifact_url = config.artifact_url
        self._pool: PostgresPool | None = None

    @property
    def groups(self) -> bool:
        """Whether concurrent requests should share transactions: SQLite has one writer."""
        return self.control.is_sqlite

    @property
    def control_path(self) -> Path:
        """The file of the control database; of SQLite."""
        return Path(self.control.url.database or "").absolute()

    @property
    def payload_root(self) -> Path:
        """The folder of payloads.

        Raises:
            SchemaValidationError: It is not told, or is none that a server can have.
        """
        return self._find_payload_root(self._artifact_url)

    def check_exists(self) -> None:
        """Refuse a SQLite store that nobody has made yet, rather than make it by a look.

        Raises:
            StoreNotFoundError: There is none.
        """
        if self.control.is_sqlite and not self.control_path.exists():
            raise StoreNotFoundError(
                f"{self.control_path} does not exist: --store or QUARK_SERVE_STORE says where the "
                "service's store is; `quark serve` makes a new one"
            )

    def make_private(self) -> list[str]:
        """Take what other users of this machine may do with the store from them.

        Folders that the server did not choose are left as they are.

        Returns:
            What was open to them, and what is to be done where it still is.
        """
        chosen: list[Path] = []
        if self.control.is_sqlite:
            database = Path(self.control.url.database or "").absolute()
            chosen += [database, *(Path(f"{database}{end}") for end in ("-wal", "-shm"))]
            chosen.append(self.folder / "workspaces")
        if self._chose_payloads:
            chosen.append(self.payload_root)
        said = [text for path in chosen if (text := _close_to_others(path))]
        mode = _find_open_mode(self.payload_root)
        if mode is not None and not self._chose_payloads:
            said.append(
                f"other users of this machine may look into {self.payload_root} (mode "
                f"{mode:o}): `chmod 700` it, unless they are meant to"
            )
        return said

    def upgrade(self) -> dict[str, int]:
        """Bring everything to the version of this Quark; workspace -> version, "" is control.

        Raises:
            SchemaMigrationError: Something cannot be migrated; it was left as it was.
            SessionStoreError: Something cannot be reached.
        """
        versions = {"": self.control.upgrade()}
        for name in self.control.list_workspaces():
            versions[name] = self._prepare(name)
        return versions

    def check(self) -> None:
        """Refuse databases of other versions.

        Raises:
            SessionStoreError: Older, newer, or not there; it says what to do.
        """
        self.control.check_version()
        for name in self.control.list_workspaces():
            self._check_workspace(name)

    def add_workspace(self, name: str) -> bool:
        """Make a workspace with its store; False where it is there already.

        Raises:
            SchemaValidationError: The name cannot be one.
            SessionStoreError: The store cannot be made.
        """
        check_workspace(name)
        if name in self.control.list_workspaces():
            return False
        # Its store first: whoever finds the workspace finds that too.
        self._prepare(name)
        return self.control.add_workspace(name)

    def open_store(self, workspace: str, *, read_only: bool = False) -> WorkspaceStore:
        """The store of a workspace.

        Args:
            workspace: Its name.
            read_only: Nothing is written to any run, and nothing compacted.

        Raises:
            SessionStoreError: It cannot be opened.
        """
        from quark_backends.store.run_store import RunStore

        if self.control.is_sqlite:
            from quark_backends.store.databases.sqlite import ensure_store

            layout = ensure_store(self.find_root(workspace))
            return RunStore.over_sqlite(layout, read_only=read_only)
        return RunStore.over_postgres(self.find_database(workspace), read_only=read_only)

    def close(self) -> None:
        """Give up connections."""
        self.control.close()
        if self._pool is not None:
            self._pool.close()

    def _prepare(self, workspace: str) -> int:
        """Make the store of a workspace, or migrate it; returns its version."""
        if not self.control.is_sqlite:
            return self.find_database(workspace).create()
        from quark_backends.store.databases.sqlite import ensure_store
        from quark_backends.store.upkeep.migration import migrate

        root = self.find_root(workspace)
        ensure_store(root)
        return migrate(root, format_time(now_us()))

    def read_version(self, workspace: str) -> int:
        """Version of a workspace's store; 0 where there is none.

        Raises:
            SessionStoreError: It cannot be reached, or is none of ours.
        """
        if not self.control.is_sqlite:
            return self.find_database(workspace).read_version() or 0
        from contextlib import closing

        from quark_backends.store.databases.sqlite import find_store, open_database, read_version

        # Opening it as a store would migrate it, and nobody has asked for that.
        layout = find_store(self.find_root(workspace))
        if layout is None or not layout.db_path.exists():
            return 0
        try:
            with closing(open_database(layout.db_path, "mode=ro")) as connection:
                return read_version(connection, layout.root)
        except sqlite3.Error as error:
            raise SessionStoreError(f"the store {layout.db_path}: {error}") from error

    def _check_workspace(self, workspace: str) -> None:
        from quark_backends.store.databases.sqlite import SCHEMA_VERSION

        version = self.read_version(workspace)
        if 0 < version < SCHEMA_VERSION or (not version and not self.control.is_sqlite):
            found = f"has schema version {version}" if version else "is not there"
            raise SessionStoreError(
                f"the store of workspace {workspace} {found}, this Quark needs version "
                f"{SCHEMA_VERSION}: run `quark db upgrade`, or `quark serve --migrate`"
            )
        if version > SCHEMA_VERSION:
            raise SessionStoreError(
                f"the store of workspace {workspace} has schema version {version}, this Quark "
                f"knows {SCHEMA_VERSION}: upgrade quark-tracker. It was left as it was."
            )

    def find_root(self, workspace: str) -> Path:
        """The storage root of a workspace; of SQLite."""
        return self.folder / "workspaces" / workspace

    def find_database(self, workspace: str) -> PostgresDatabase:
        """The schema of a workspace; of PostgreSQL."""
        from quark_backends.store.databases.postgres import PostgresDatabase
        from quark_backends.store.databases.postgres_pool import PostgresPool

        if self._pool is None:
            self._pool = PostgresPool(
                self.control.url.render_as_string(hide_password=False),
                max_connections=_CONNECTIONS,
            )
        return PostgresDatabase(schema=f"{self.schema_prefix}{workspace}", pool=self._pool)

    def _find_payload_root(self, artifact_url: str) -> Path:
        if not artifact_url:
            if not self.control.is_sqlite:
                raise SchemaValidationError(
                    "artifacts must be given where the store is PostgreSQL: a folder that all "
                    "servers of this store share, such as /srv/quark/artifacts"
                )
            return self.folder / "payloads"
        parts = urlsplit(artifact_url)
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return Path(unquote(parts.path))
        if "://" in artifact_url:
            raise SchemaValidationError(
                f"artifacts must be a folder, as a path or a file:// URL, not {parts.scheme}://"
            )
        return Path(artifact_url).expanduser().absolute()


def _find_open_mode(path: Path) -> int | None:
    """The permissions of what other users may use; None where they may not, or it is not there."""
    if os.name != "posix":
        return None
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    return mode if mode & _OTHERS else None


def _close_to_others(path: Path) -> str | None:
    """Take a path's permissions from other users; what was done, or could not be."""
    mode = _find_open_mode(path)
    if mode is None:
        return None
    try:
        path.chmod(mode & ~_OTHERS)
    except OSError as error:
        return (
            f"other users of this machine may use {path} (mode {mode:o}), and that cannot be "
            f"changed: {error.strerror}. Its owner can: chmod go= {path}"
        )
    return f"{path} was open to other users of this machine (mode {mode:o}), and is not any more"
