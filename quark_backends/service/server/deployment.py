"""The storage of a server: control database with workspaces and keys, stores, payloads."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from quark_backends.service.server.config import ServiceConfig
from quark_backends.store.databases.connection import find_refusal
from quark_core.errors import (
    SchemaMigrationError,
    SchemaValidationError,
    SessionStoreError,
    StoreNotFoundError,
)
from quark_core.records import format_time
from quark_core.records.base import now_us

if TYPE_CHECKING:
    from quark_backends.store.databases.postgres import PostgresDatabase, PostgresPool
    from quark_backends.store.run_store import RunStore

# The control database: which workspaces there are, which keys let somebody in, and who has.
#
# Its tables have a version, with one step to each.

_METADATA = MetaData()
_Number = BigInteger().with_variant(Integer(), "sqlite")

control_version = Table("control_version", _METADATA, Column("version", _Number, nullable=False))

workspace = Table(
    "workspace",
    _METADATA,
    Column("name", Text, primary_key=True),
    Column("created_us", _Number, nullable=False),
)

key = Table(
    "api_key",
    _METADATA,
    Column("id", Text, primary_key=True),
    Column("workspace", Text, nullable=False),
    Column("name", Text, nullable=False),
    # SHA-256 of the secret, in hexadecimal: a secret of 32 random bytes needs no slower hash.
    Column("digest", Text, nullable=False),
    # Sorted, with commas between them.
    Column("scopes", Text, nullable=False),
    Column("created_us", _Number, nullable=False),
    Column("expires_us", _Number),
    Column("revoked_us", _Number),
    Column("last_used_us", _Number),
    Index("api_key_by_workspace", "workspace"),
)

page_session = Table(
    "page_session",
    _METADATA,
    # SHA-256 of what the browser keeps, in hexadecimal.
    Column("digest", Text, primary_key=True),
    Column("key_id", Text, nullable=False),
    Column("created_us", _Number, nullable=False),
    Column("expires_us", _Number, nullable=False),
)

told = Table(
    "told",
    _METADATA,
    Column("workspace", Text, primary_key=True),
    # SHA-256 of what was told, in hexadecimal: what it is made of is others' text.
    Column("digest", Text, primary_key=True),
    Column("told_us", _Number, nullable=False),
)


def _make_first(connection: Connection) -> None:
    _METADATA.create_all(connection, [control_version, workspace, key])


def _add_page_sessions(connection: Connection) -> None:
    _METADATA.create_all(connection, [page_session])


def _add_told(connection: Connection) -> None:
    _METADATA.create_all(connection, [told])


STEPS: tuple[Callable[[Connection], None], ...] = (_make_first, _add_page_sessions, _add_told)
"""Make version 1 of nothing, version 2 of version 1, and so on; they add, and take nothing away."""

CONTROL_VERSION = len(STEPS)
"""Version that this Quark knows."""


_SCHEMA = "quark_control"
_WORKSPACE = re.compile(r"[a-z][a-z0-9_]{0,47}")
_BUSY_TIMEOUT_S = 10.0
_ATTEMPTS = 3


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. Times are microseconds since the epoch, UTC.

    Attributes:
        id: What stands in the key before its secret.
        workspace: All that it reaches.
        name: For people.
        digest: SHA-256 of the secret, in hexadecimal.
        scopes: What it may do.
        created_us, expires_us, revoked_us, last_used_us: When; None for never.
    """

    id: str
    workspace: str
    name: str
    digest: str
    scopes: frozenset[str]
    created_us: int
    expires_us: int | None = None
    revoked_us: int | None = None
    last_used_us: int | None = None

    def is_live(self, moment_us: int) -> bool:
        """Whether it lets somebody in at a moment."""
        return self.revoked_us is None and (self.expires_us is None or moment_us < self.expires_us)


class PageSession(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody's login to the page. Times are microseconds since the epoch, UTC.

    Attributes:
        key: The key that it was made with, without its secret.
        created_us, expires_us: From when on and until when it lets somebody in.
    """

    key: StoredKey
    created_us: int
    expires_us: int


def check_workspace(name: str) -> str:
    """The name of a workspace, which is part of paths and of the names of schemas.

    Raises:
        SchemaValidationError: It cannot be one.
    """
    if _WORKSPACE.fullmatch(name) is None:
        raise SchemaValidationError(
            "workspace must start with a lowercase letter and continue with at most 47 "
            f"lowercase letters, digits and '_', got {name!r:.80}"
        )
    return name


def parse_store_url(store_url: str) -> URL:
    """The URL of a server's store.

    Raises:
        SchemaValidationError: It is none that a server can have.
    """
    try:
        url = make_url(store_url)
    except ArgumentError:
        # What it is may hold a password.
        raise SchemaValidationError(
            "store must be a URL such as sqlite:///PATH or "
            "postgresql+psycopg://USER@HOST:PORT/DATABASE"
        ) from None
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise SchemaValidationError(
            f"store must start with sqlite:/// or postgresql+psycopg://, not {url.drivername}://"
        )
    if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
        raise SchemaValidationError(
            "store must name a file: sqlite:///relative/path or sqlite:////absolute/path"
        )
    if url.drivername != "sqlite" and (refusal := find_refusal(url)):
        raise SchemaValidationError(f"store: {refusal}")
    return url


class ControlDatabase:
    """Workspaces and keys; from any thread.

    Args:
        store_url: The server's store: a SQLite file, or a PostgreSQL database in
            which this has a schema of its own.

    Raises:
        SchemaValidationError: The URL is none that a server can have.
    """

    def __init__(self, store_url: str) -> None:
        self.url = parse_store_url(store_url)
        self.is_sqlite = self.url.drivername == "sqlite"
        self._engine = self._make_engine()

    @property
    def name(self) -> str:
        """What messages call it; without a password."""
        return self.url.render_as_string(hide_password=True)

    def read_version(self) -> int:
        """Version of the tables; 0 where there are none.

        Raises:
            SessionStoreError: The database cannot be reached.
        """
        if self.is_sqlite and not Path(self.url.database or "").exists():
            return 0
        with self._begin() as connection:
            return self._read_version(connection)

    def upgrade(self) -> int:
        """Bring the tables to the version of this Quark, and return it; whoever else does so too.

        Raises:
            SchemaMigrationError: A newer Quark made them.
            SessionStoreError: The database cannot be reached or written.
        """
        if self.is_sqlite:
            folder = Path(self.url.database or "").absolute().parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SessionStoreError(f"store: {folder} cannot be created: {error}") from error
        if not self.is_sqlite:
            self._make_schema()
        with self._begin(write=True) as connection:
            if not self.is_sqlite:
                # Two processes that begin at once: the second waits here.
                connection.execute(text(f"LOCK TABLE {_SCHEMA}.upgrading IN ACCESS EXCLUSIVE MODE"))
            version = self._read_version(connection)
            if version > CONTROL_VERSION:
                raise SchemaMigrationError(self._newer(version))
            if version == CONTROL_VERSION:
                return version
            for step in STEPS[version:]:
                step(connection)
            connection.execute(control_version.delete())
            connection.execute(insert(control_version).values(version=CONTROL_VERSION))
        return CONTROL_VERSION

    def check_version(self) -> None:
        """Refuse tables of another version.

        Raises:
            SessionStoreError: They are older, newer or not there; it says what to do.
        """
        version = self.read_version()
        if version > CONTROL_VERSION:
            raise SessionStoreError(self._newer(version))
        if version < CONTROL_VERSION:
            found = f"has version {version}" if version else "is empty"
            raise SessionStoreError(
                f"the control database {self.name} {found}, but this Quark requires version "
                f"{CONTROL_VERSION}. Run `quark db upgrade`, or `quark serve --migrate`"
            )

    def list_workspaces(self) -> list[str]:
        """Names of the workspaces, sorted."""
        with self._begin() as connection:
            return list(connection.scalars(select(workspace.c.name).order_by(workspace.c.name)))

    def add_workspace(self, name: str) -> bool:
        """Make a workspace; False where it is there already.

        Raises:
            SchemaValidationError: The name cannot be one.
        """
        check_workspace(name)
        try:
            with self._begin(write=True) as connection:
                connection.execute(insert(workspace).values(name=name, created_us=now_us()))
        except IntegrityError:
            return False
        return True

    def note_told(self, of_workspace: str, key: str) -> int | None:
        """Note that something is told now; when it was, where whoever has noted it before.

        Returns:
            Microseconds since the epoch, UTC; None where it was not noted before.
        """
        digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
        values = {"workspace": of_workspace, "digest": digest, "told_us": now_us()}
        try:
            with self._begin(write=True) as connection:
                connection.execute(insert(told).values(values))
        except IntegrityError:
            its = (told.c.workspace == of_workspace, told.c.digest == digest)
            with self._begin() as connection:
                return int(connection.scalars(select(told.c.told_us).where(*its)).one())
        return None

    def forget_told(self, before_us: int) -> None:
        """Forget what was told before a moment."""
        with self._begin(write=True) as connection:
            connection.execute(delete(told).where(told.c.told_us < before_us))

    def add_key(self, new: StoredKey) -> None:
        """Keep a key."""
        values = msgspec.structs.asdict(new)
        values["scopes"] = ",".join(sorted(new.scopes))
        with self._begin(write=True) as connection:
            connection.execute(insert(key).values(values))

    def find_key(self, key_id: str) -> StoredKey | None:
        """A key, or None."""
        with self._begin() as connection:
            row = connection.execute(select(key).where(key.c.id == key_id)).mappings().first()
        return None if row is None else _to_key(row)

    def list_keys(self, of_workspace: str | None = None) -> list[StoredKey]:
        """The keys of a workspace, or all, oldest first."""
        statement = select(key).order_by(key.c.created_us, key.c.id)
        if of_workspace is not None:
            statement = statement.where(key.c.workspace == of_workspace)
        with self._begin() as connection:
            return [_to_key(row) for row in connection.execute(statement).mappings()]

    def end_key(
        self, key_id: str, *, revoked_us: int | None = None, expires_us: int | None = None
    ) -> None:
        """Revoke a key, or have it expire at a moment; what ends it sooner stays."""
        with self._begin(write=True) as connection:
            # What was done already is told as done only once it holds everywhere: a
            # transaction that locks waits for standbys, one that only reads does not.
            connection.execute(select(key.c.id).where(key.c.id == key_id).with_for_update())
            if revoked_us is not None:
                connection.execute(
                    update(key)
                    .where(key.c.id == key_id, key.c.revoked_us.is_(None))
                    .values(revoked_us=revoked_us)
                )
            if expires_us is not None:
                connection.execute(
                    update(key)
                    .where(
                        key.c.id == key_id,
                        key.c.expires_us.is_(None) | (key.c.expires_us > expires_us),
                    )
                    .values(expires_us=expires_us)
                )

    def note_used(self, moments: Mapping[str, int]) -> None:
        """Note when keys were used last."""
        with self._begin(write=True) as connection:
            for key_id, moment_us in moments.items():
                connection.execute(
                    update(key)
                    .where(
                        key.c.id == key_id,
                        key.c.last_used_us.is_(None) | (key.c.last_used_us < moment_us),
                    )
                    .values(last_used_us=moment_us)
                )

    def add_session(self, digest: str, key_id: str, *, lasts_us: int) -> PageSession | None:
        """Keep a login, made with a key, for a time; None where the key is not live any more.

        It lasts no longer than the key. What is over of other logins is forgotten.
        """
        moment_us = now_us()
        with self._begin(write=True) as connection:
            rows = connection.execute(select(key).where(key.c.id == key_id).with_for_update())
            found = _to_key(row) if (row := rows.mappings().first()) is not None else None
            if found is None or not found.is_live(moment_us):
                return None
            ends = [moment_us + lasts_us, *filter(None, [found.expires_us])]
            connection.execute(
                delete(page_session).where(
                    or_(
                        page_session.c.expires_us <= moment_us,
                        page_session.c.key_id.in_(
                            select(key.c.id).where(key.c.revoked_us.is_not(None))
                        ),
                    )
                )
            )
            connection.execute(
                insert(page_session).values(
                    digest=digest, key_id=key_id, created_us=moment_us, expires_us=min(ends)
                )
            )
        return PageSession(key=found, created_us=moment_us, expires_us=min(ends))

    def find_session(self, digest: str) -> PageSession | None:
        """A login that is not over, with its key as it is now; None where there is none."""
        statement = (
            select(key, page_session.c.created_us.label("begun_us"), page_session.c.expires_us)
            .join(page_session, page_session.c.key_id == key.c.id)
            .where(page_session.c.digest == digest)
        )
        with self._begin() as connection:
            row = connection.execute(statement).first()
        if row is None:
            return None
        *own, begun_us, ends_us = row
        session = PageSession(
            key=_to_key(dict(zip(key.c.keys(), own, strict=True))),
            created_us=begun_us,
            expires_us=ends_us,
        )
        moment_us = now_us()
        is_over = moment_us >= session.expires_us or not session.key.is_live(moment_us)
        return None if is_over else session

    def end_session(self, digest: str) -> None:
        """End a login; one that is not there is no mistake."""
        with self._begin(write=True) as connection:
            connection.execute(delete(page_session).where(page_session.c.digest == digest))

    def probe(self) -> None:
        """Ask it something small.

        Raises:
            SessionStoreError: It does not answer.
        """
        with self._begin() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        """Give up connections."""
        self._engine.dispose()

    def _read_version(self, connection: Connection) -> int:
        schema = None if self.is_sqlite else _SCHEMA
        if not inspect(connection).has_table(control_version.name, schema=schema):
            return 0
        return int(connection.scalar(select(control_version.c.version)) or 0)

    def _make_schema(self) -> None:
        for _ in range(_ATTEMPTS):
            try:
                with self._begin(write=True) as connection:
                    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {_SCHEMA}"))
                    connection.execute(
                        text(f"CREATE TABLE IF NOT EXISTS {_SCHEMA}.upgrading (pk int PRIMARY KEY)")
                    )
            except IntegrityError:
                continue  # two that do so at once get in each other's way, but once
            return

    def _newer(self, version: int) -> str:
        return (
            f"the control database {self.name} has version {version}, but this Quark supports up "
            f"to {CONTROL_VERSION}. Upgrade quark-tracker to use it. The database was not changed."
        )

    @contextmanager
    def _begin(self, *, write: bool = False) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                if self.is_sqlite:
                    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
                yield connection
                connection.commit()
        except IntegrityError:
            raise
        except (SQLAlchemyError, sqlite3.Error) as error:
            reason = getattr(error, "orig", None) or type(error).__name__
            raise SessionStoreError(
                f"the control database {self.name} cannot be used: {reason}"
            ) from error

    def _make_engine(self) -> Engine:
        if not self.is_sqlite:
            from quark_backends.store.databases.postgres import make_engine

            return make_engine(
                self.url,
                pool_size=3,
                max_overflow=2,
                pool_pre_ping=True,
                pool_timeout=_BUSY_TIMEOUT_S,
            ).execution_options(schema_translate_map={None: _SCHEMA})
        engine = create_engine(
            self.url, connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False}
        )

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, _record: Any) -> None:
            # The driver begins nothing by itself: `_begin` says how a transaction begins.
            connection.isolation_level = None
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

        return engine


def _to_key(row: Mapping[Any, Any]) -> StoredKey:
    values = {str(name): value for name, value in row.items()}
    values["scopes"] = frozenset(values["scopes"].split(","))
    return StoredKey(**values)


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
                f"{self.control_path} does not exist. --store or QUARK_SERVE_STORE sets the "
                "location of the server's store. `quark serve` creates a new one"
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
                f"other users of this machine can read {self.payload_root} (mode {mode:o}). To "
                "prevent this, run `chmod 700` on it"
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

    def open_store(self, workspace: str, *, read_only: bool = False) -> RunStore:
        """The store of a workspace.

        Args:
            workspace: Its name.
            read_only: Nothing is written to any run, and nothing compacted.

        Raises:
            SessionStoreError: It cannot be opened.
        """
        from quark_backends.store.run_store import PostgresRunStore, SqliteRunStore

        if self.control.is_sqlite:
            from quark_backends.store.databases.sqlite import ensure_store

            layout = ensure_store(self.find_root(workspace))
            return SqliteRunStore(layout, read_only=read_only)
        return PostgresRunStore(self.find_database(workspace), read_only=read_only)

    def close(self) -> None:
        """Give up connections."""
        self.control.close()
        if self._pool is not None:
            self._pool.close()

    def _prepare(self, workspace: str) -> int:
        """Make the store of a workspace, or migrate it; returns its version."""
        if not self.control.is_sqlite:
            return self.find_database(workspace).create()
        from quark_backends.store.databases.sqlite import ensure_store, migrate

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

        from quark_backends.store.databases.sqlite import find_store, read_version
        from quark_backends.store.databases.write_ahead_log import open_database

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
            found = f"has schema version {version}" if version else "does not exist"
            raise SessionStoreError(
                f"the store of workspace {workspace} {found}, but this Quark requires version "
                f"{SCHEMA_VERSION}. Run `quark db upgrade`, or `quark serve --migrate`"
            )
        if version > SCHEMA_VERSION:
            raise SessionStoreError(
                f"the store of workspace {workspace} has schema version {version}, this Quark "
                f"supports {SCHEMA_VERSION}. Upgrade quark-tracker. The store was not changed."
            )

    def find_root(self, workspace: str) -> Path:
        """The storage root of a workspace; of SQLite."""
        return self.folder / "workspaces" / workspace

    def find_database(self, workspace: str) -> PostgresDatabase:
        """The schema of a workspace; of PostgreSQL."""
        from quark_backends.store.databases.postgres import PostgresDatabase, PostgresPool

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
                    "artifacts is required if the store is PostgreSQL: a folder that all "
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
            f"other users of this machine can access {path} (mode {mode:o}), and this cannot be "
            f"changed: {error.strerror}. Its owner can change it: chmod go= {path}"
        )
    return f"{path} was open to other users (mode {mode:o}). Quark restricted it"
