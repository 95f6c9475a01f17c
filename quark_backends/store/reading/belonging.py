"""What is said of projects and groups, as rows have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.run_rows import read_mapping, read_texts
from quark_core.backends.edits import (
    StoredGroup,
    StoredProject,
    gather_groups,
    unknown_project,
)
from quark_core.records import format_time


def load_groups(
    connection: StoreConnection, project: str | None, store_name: str | None = None
) -> list[StoredGroup]:
    """See `SupportsBelonging.list_groups`; inside a transaction."""
    return gather_groups(
        _list_members(connection, project, store_name), _list_described(connection, project)
    )


def load_group(connection: StoreConnection, project: str, path: str) -> StoredGroup:
    """One group, described or not."""
    found = next((g for g in load_groups(connection, project) if g.path == path), None)
    return StoredGroup(project=project, path=path) if found is None else found


def load_project(
    connection: StoreConnection, project: str, store_name: str | None = None
) -> StoredProject:
    """See `SupportsBelonging.load_project`; inside a transaction."""
    row = connection.execute(
        "SELECT id, description, fields, tags FROM project WHERE name = ?", (project,)
    ).fetchone()
    if row is None:
        raise unknown_project(project)
    project_id, *said = row
    sql = "SELECT count(*), max(created_us) FROM run WHERE project_id = ? AND trashed_us IS NULL"
    arguments = [project_id]
    if store_name is not None:
        sql, arguments = f"{sql} AND store_name = ?", [project_id, store_name]
    runs, newest_us = connection.execute(sql, arguments).fetchone()
    return StoredProject(
        project=project,
        **_read(*said),
        runs=int(runs),
        newest_at=None if newest_us is None else format_time(newest_us),
    )


def _list_members(
    connection: StoreConnection, project: str | None, store_name: str | None
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    sql = (
        "SELECT project.name, group_paths, run.created_us FROM run"
        " JOIN project ON project.id = project_id"
        " WHERE trashed_us IS NULL AND group_paths IS NOT NULL"
    )
    arguments = []
    for column, wanted in (("project.name", project), ("store_name", store_name)):
        if wanted is not None:
            sql += f" AND {column} = ?"
            arguments.append(wanted)
    for name, paths, created_us in connection.execute(sql, arguments).fetchall():
        yield name, read_texts(paths), format_time(created_us)


def _list_described(connection: StoreConnection, project: str | None) -> list[StoredGroup]:
    sql = (
        "SELECT project.name, path, run_group.description, run_group.fields, run_group.tags"
        " FROM run_group JOIN project ON project.id = project_id"
    )
    rows = (
        connection.execute(sql)
        if project is None
        else connection.execute(f"{sql} WHERE project.name = ?", (project,))
    )
    return [
        StoredGroup(project=name, path=path, **_read(*said))
        for name, path, *said in rows.fetchall()
    ]


def _read(description: str | None, fields: str | None, tags: str | None) -> dict[str, Any]:
    return {
        "description": description,
        "fields": read_mapping(fields),
        "tags": read_texts(tags),
    }
