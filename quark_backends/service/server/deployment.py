"""Where a server keeps everything: control database, stores of workspaces, payloads."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.control import ControlDatabase, check_workspace
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import format_time
from quark_core.times import now_us

if TYPE_CHECKING:
    from quark_backends.service.server.stores import WorkspaceStore
    from quark_backends.store.postgres import PostgresDatabase, PostgresPool

__all__ = ["DEFAULT_WORKSPACE", "Deployment"]

DEFAULT_WORKSPACE = "default"
"""The workspace that a new server has."""

_SCHEMA_PREFIX = "quark_ws_"
_CONNECTIONS = 40


class Deployment:
    """The databases and folders that a configuration names; from any thread.

    SQLite: `sqlite:///DIR/service.db` is the control database, and each workspace
    has a storage root `DIR/workspaces/NAME`. PostgreSQL: the control database is
    the schema `quark_control`, and each workspace the schema `quark_ws_NAME`.

    Attributes:
        control: The control database.
        payload_root: The folder of payloads.

    Raises:
        SchemaValidationError: A URL that a server cannot have.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.control = ControlDatabase(config.store_url)
        self._folder = Path(self.control.url.database or "").absolute().parent
        self.payload_root = self._find_payload_root(config.artifact_url)
        self._pool: PostgresPool | None = None

    @property
    def groups(self) -> bool:
        """Whether concurrent requests should share transactions: SQLite has one writer."""
        return self.control.is_sqlite

    def check_exists(self) -> None:
        """Refuse a SQLite store that nobody has made yet, rather than make it by a look.

        Raises:
            SessionStoreError: There is none.
        """
        path = Path(self.control.url.database or "").absolute()
        if self.control.is_sqlite and not path.exists():
            raise SessionStoreError(
                f"{path} does not exist: --store or QUARK_SERVE_STORE says where the service's "
                "store is; `quark serve` makes a new one"
            )

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

    def back_up(self, target: Path) -> list[Path]:
        """Copy the databases of a SQLite store into a new folder, laid out as this one.

        Each is as of one moment, also while it is written; keys come first, so
        that no workspace is without them.

        Raises:
            SessionStoreError: PostgreSQL, a folder that is there already, or no room.
        """
        from quark_backends.store.layout import StoreLayout
        from quark_backends.store.snapshot import copy_database

        if not self.control.is_sqlite:
            raise SessionStoreError(
                "store is on PostgreSQL, which has its own tools: pg_dump, or an archive of its log"
            )
        source = Path(self.control.url.database or "").absolute()
        made = []
        try:
            target.mkdir(parents=True)
            copy_database(source, target / source.name)
            made.append(target / source.name)
            for name in self.control.list_workspaces():
                layout = StoreLayout(self._root(name))
                copied = StoreLayout(target / "workspaces" / name)
                copied.root.mkdir(parents=True)
                shutil.copyfile(layout.marker, copied.marker)
                copy_database(layout.db_path, copied.db_path)
                made.append(copied.db_path)
        except FileExistsError as error:
            raise SessionStoreError(f"into: {target} is there already; name a new one") from error
        except (OSError, sqlite3.Error) as error:
            raise SessionStoreError(f"into: the copy in {target} is not whole: {error}") from error
        return made

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

    def open_store(self, workspace: str) -> WorkspaceStore:
        """The store of a workspace.

        Raises:
            SessionStoreError: It cannot be opened.
        """
        from quark_backends.store.run_store import RunStore

        if self.control.is_sqlite:
            from quark_backends.store.database import ensure_store

            return RunStore.over_sqlite(ensure_store(self._root(workspace)))
        return RunStore.over_postgres(self._database(workspace))

    def close(self) -> None:
        """Give up connections."""
        self.control.close()
        if self._pool is not None:
            self._pool.close()

    def _prepare(self, workspace: str) -> int:
        """Make the store of a workspace, or migrate it; returns its version."""
        if not self.control.is_sqlite:
            return self._database(workspace).create()
        from quark_backends.store.database import ensure_store
        from quark_backends.store.migration import migrate

        root = self._root(workspace)
        ensure_store(root)
        return migrate(root, format_time(now_us()))

    def read_version(self, workspace: str) -> int:
        """Version of a workspace's store; 0 where there is none.

        Raises:
            SessionStoreError: It cannot be reached, or is none of ours.
        """
        if not self.control.is_sqlite:
            return self._database(workspace).read_version() or 0
        from contextlib import closing

        from quark_backends.store.database import find_store, open_database, read_version

        # Opening it as a store would migrate it, and nobody has asked for that.
        layout = find_store(self._root(workspace))
        if layout is None or not layout.db_path.exists():
            return 0
        try:
            with closing(open_database(layout.db_path, "mode=ro")) as connection:
                return read_version(connection, layout.root)
        except sqlite3.Error as error:
            raise SessionStoreError(f"the store {layout.db_path}: {error}") from error

    def _check_workspace(self, workspace: str) -> None:
        from quark_backends.store.database import SCHEMA_VERSION

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

    def _root(self, workspace: str) -> Path:
        return self._folder / "workspaces" / workspace

    def _database(self, workspace: str) -> PostgresDatabase:
        from quark_backends.store.postgres import PostgresDatabase, PostgresPool

        if self._pool is None:
            self._pool = PostgresPool(
                self.control.url.render_as_string(hide_password=False),
                max_connections=_CONNECTIONS,
            )
        return PostgresDatabase(schema=f"{_SCHEMA_PREFIX}{workspace}", pool=self._pool)

    def _find_payload_root(self, artifact_url: str) -> Path:
        if not artifact_url:
            if not self.control.is_sqlite:
                raise SchemaValidationError(
                    "artifacts must be given where the store is PostgreSQL: a folder that all "
                    "servers of this store share, such as /srv/quark/artifacts"
                )
            return self._folder / "payloads"
        parts = urlsplit(artifact_url)
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return Path(unquote(parts.path))
        if "://" in artifact_url:
            raise SchemaValidationError(
                f"artifacts must be a folder, as a path or a file:// URL, not {parts.scheme}://"
            )
        return Path(artifact_url).expanduser().absolute()
