"""Copies all that a service keeps into one folder, while it serves, and puts it back.

Databases come first, payloads second: a payload is there before the record
that names it, and is taken away only with its run. So every payload that a
copied record names is in the copy, unless its run was removed meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quark_backends.store.databases.layout import LOG_SUFFIX
from quark_backends.store.databases.write_ahead_log import open_database
from quark_backends.store.upkeep.backup import (
    BackupFolder,
    BackupManifest,
    check_payloads,
    copy_modes,
    copy_store,
    copy_tree,
    count_payloads,
    describe_missing,
    find_named_payloads,
    note_lacking,
    verify_backup,
)
from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from quark_backends.service.server.deployment import Deployment

_SQLITE = "service on SQLite"
_POSTGRESQL = "service on PostgreSQL"
_CONTROL = "service.db"
_WORKSPACES = "workspaces"
_PAYLOADS = "payloads"
_DATABASE_PARTS = ("", LOG_SUFFIX, "-shm")


class Restored:
    """What came of a restore.

    Attributes:
        manifest: The backup's.
        aside: What was there before -> what it is called now.
    """

    def __init__(self, manifest: BackupManifest, aside: dict[str, str]) -> None:
        self.manifest = manifest
        self.aside = aside


def back_up_service(
    deployment: Deployment, target: Path, *, keep_going: bool = False
) -> BackupManifest:
    """Make a folder that has all of a service: keys, runs, payloads.

    Args:
        deployment: The service, which may be running.
        target: The folder to make.
        keep_going: See `back_up_store`.

    Raises:
        SessionStoreError: Something cannot be read or is missing, or there is
            no room; nothing is left then.
    """
    places = (deployment.folder / _WORKSPACES, deployment.payload_root)
    if any(_is_within(target, place) for place in places):
        raise SessionStoreError(f"{target} is in the store itself. Choose a folder outside of it")
    with BackupFolder(target) as backup:
        if deployment.control.is_sqlite:
            counts = _back_up_sqlite(deployment, backup)
        else:
            counts = _back_up_postgresql(deployment, backup)
        if backup.lacking:
            backup.lacking.append(
                f"Quark looked for the payloads in {deployment.payload_root}. --artifacts "
                "selects another folder"
            )
        check_payloads(backup, keep_going=keep_going)
        kind = _SQLITE if deployment.control.is_sqlite else _POSTGRESQL
        return backup.finish(kind, counts | count_payloads(backup))


def restore_service(folder: Path, deployment: Deployment, *, replace: bool = False) -> Restored:
    """Put a backup in the place of a service that does not run.

    Args:
        folder: The backup; it is verified first, and each file once more where it goes.
        deployment: Where it goes.
        replace: Whether what is there makes way; it is renamed, not deleted.

    Raises:
        SessionStoreError: It is no whole backup of such a service, something is
            there already, or there is no room.
    """
    manifest = verify_backup(folder)
    kind = _SQLITE if deployment.control.is_sqlite else _POSTGRESQL
    if manifest.kind != kind:
        raise SessionStoreError(
            f"{folder} is a backup of a {manifest.kind}, which a {kind} cannot restore"
        )
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    if not deployment.control.is_sqlite:
        return _restore_postgresql(folder, manifest, deployment, replace=replace, moment=moment)
    control = deployment.control_path
    root = deployment.folder
    present = [*_list(root / _WORKSPACES), *_list(deployment.payload_root)]
    present += [path for path in _find_database(control) if os.path.lexists(path)]
    _check_empty(present, replace=replace)
    with (
        _Arrival(folder, manifest, _PAYLOADS, deployment.payload_root) as payloads,
        _Arrival(folder, manifest, _WORKSPACES, root / _WORKSPACES) as workspaces,
        _Arrival(folder, manifest, _CONTROL, root) as keys,
    ):
        try:
            # Without its control database there is no service: until it comes, nothing is served.
            aside = _set_aside([path for path in present if path.parent == root], moment)
            aside |= _set_aside([path for path in present if path.parent != root], moment)
            payloads.arrive()
            workspaces.arrive()
            keys.arrive(as_name=control.name)
        except OSError as error:
            raise SessionStoreError(f"{root} cannot be written: {error}") from error
    return Restored(manifest, aside)


def _back_up_sqlite(deployment: Deployment, backup: BackupFolder) -> dict[str, int]:
    # Keys first: no workspace is without those that let somebody in.
    backup.copy_database(deployment.control_path, _CONTROL)
    try:
        with closing(open_database(backup.locate(_CONTROL), "mode=ro&immutable=1")) as connection:
            names = [row[0] for row in connection.execute("SELECT name FROM workspace")]
    except sqlite3.Error as error:
        raise SessionStoreError(f"the copied {_CONTROL} cannot be read: {error}") from error
    counts: Counter[str] = Counter(workspaces=len(names), runs=0)
    for name in sorted(names):
        counts.update(copy_store(backup, deployment.find_root(name), f"{_WORKSPACES}/{name}/"))
        backup.copy_mode(deployment.find_root(name), f"{_WORKSPACES}/{name}")
    _copy_payloads(deployment, backup)
    for name in names:
        note_lacking(
            backup,
            deployment.find_root(name),
            f"{_WORKSPACES}/{name}/",
            partial(_find_payload, name),
        )
    return {"workspaces": counts["workspaces"], "runs": counts["runs"]}


def _back_up_postgresql(deployment: Deployment, backup: BackupFolder) -> dict[str, int]:
    from quark_backends.service.server.postgres_dump import dump_schemas
    from quark_backends.store.upkeep.trash import SharedTrash

    names = dump_schemas(deployment.control.url, deployment.schema_prefix, backup)
    named, runs = [], 0
    for name in names:
        # Of now, which is later than the copy: what is named in that is named here. Of any
        # version, since before an upgrade is when one wants a backup.
        with closing(deployment.find_database(name).take()) as connection:
            connection.begin_read()
            (count,) = connection.execute(
                "SELECT count(*) FROM run WHERE trashed_us IS NULL"
            ).fetchone() or (0,)
            runs += count
            named += [(name, *found) for found in find_named_payloads(connection)]
            connection.commit()
    _copy_payloads(deployment, backup)
    missing: dict[str, list[tuple[str, str]]] = {}
    for name, run_id, sha256 in named:
        if not any(path in backup.files for path in _find_payload(name, run_id, sha256)):
            missing.setdefault(name, []).append((run_id, sha256))
    for name, found in missing.items():
        trash = SharedTrash(deployment.find_database(name))
        gone = set(trash.list_gone([run_id for run_id, _ in found]))
        backup.lacking += [describe_missing(*each) for each in found if each[0] not in gone]
    return {"workspaces": len(names), "runs": runs}


def _restore_postgresql(
    folder: Path, manifest: BackupManifest, deployment: Deployment, *, replace: bool, moment: str
) -> Restored:
    from quark_backends.service.server.postgres_dump import find_schemas, load_schemas

    url = deployment.control.url
    schemas, present = find_schemas(url), _list(deployment.payload_root)
    _check_empty([*schemas, *present], replace=replace)
    with _Arrival(folder, manifest, _PAYLOADS, deployment.payload_root) as payloads:
        aside = load_schemas(url, folder, schemas)
        try:
            aside |= _set_aside(present, moment)
            payloads.arrive()
        except OSError as error:
            raise SessionStoreError(
                f"{deployment.payload_root} cannot be written: {error}. The databases are "
                "restored, the payloads are not"
            ) from error
    return Restored(manifest, aside)


class _Arrival:
    """One part of a backup on its way to a place: copied and verified within it, then named.

    Within, since the place may be a disk of its own.
    """

    def __init__(self, folder: Path, manifest: BackupManifest, part: str, place: Path) -> None:
        self._part, self._place = part, place
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SessionStoreError(f"{place} cannot be created: {error}") from error
        self._copy = BackupFolder(place / f".restoring-{os.urandom(4).hex()}")
        try:
            for path, file in manifest.files.items():
                if _is_part(path, part) and self._copy.copy_file(folder / path, path) != file:
                    raise SessionStoreError(f"{folder / path} changed during the restore")
            for path in manifest.links:
                if _is_part(path, part):
                    self._copy.copy_link(folder / path, path)
            copy_modes(self._copy, folder / part, f"{part}/")
            self._copy.check()
        except BaseException:
            self._copy.discard()
            raise

    def __enter__(self) -> _Arrival:
        return self

    def __exit__(self, *_error: object) -> None:
        self._copy.discard()

    def arrive(self, as_name: str = "") -> None:
        """Give it its names; of a part that is one file, this one."""
        source = self._copy.locate(self._part)
        if not source.exists():
            return
        if as_name:
            os.rename(source, self._place / as_name)
            return
        for path in _list(source):
            os.rename(path, self._place / path.name)


def _copy_payloads(deployment: Deployment, backup: BackupFolder) -> None:
    # What begins with a dot is on its way in, or was set aside.
    copy_tree(
        backup,
        deployment.payload_root,
        f"{_PAYLOADS}/",
        leave_out=lambda path: path.startswith("."),
    )


def _find_payload(workspace: str, run_id: str, sha256: str) -> list[str]:
    """Where in a backup a payload lies."""
    return [f"{_PAYLOADS}/{workspace}/{run_id}/{sha256[:2]}/{sha256}"]


def _check_empty(present: Sequence[object], *, replace: bool) -> None:
    if present and not replace:
        raise SessionStoreError(
            f"{present[0]} already exists and would be replaced. Restore into an empty place, "
            "or stop the server and pass --replace, which renames the existing files"
        )


def _set_aside(present: list[Path], moment: str) -> dict[str, str]:
    """Rename what is there; old name -> new one."""
    aside = {}
    for path in present:
        new = path.with_name(f".replaced-{moment}-{path.name}")
        os.rename(path, new)
        aside[str(path)] = str(new)
    return aside


def _find_database(path: Path) -> Iterator[Path]:
    """The files of a database: a log that is left behind would be taken for that of the new one."""
    for suffix in _DATABASE_PARTS:
        yield path.with_name(f"{path.name}{suffix}")


def _list(folder: Path) -> list[Path]:
    """What is in a folder, but for what was set aside."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []


def _is_part(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}/")


def _is_within(path: Path, folder: Path) -> bool:
    place = Path(os.path.abspath(path))
    return place == folder or folder in place.parents
