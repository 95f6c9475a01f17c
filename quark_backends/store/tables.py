"""Tables of the store.

A writer is one process's stream into a run; `head` is the number of its
newest acknowledged batch and moves in the transaction that stores the batch.
A batch is kept as it came: one compressed columnar body.
"""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "DDL", "SCHEMA_VERSION"]

SCHEMA_VERSION = 1
"""Version of these tables, kept in SQLite's user_version."""

APPLICATION_ID = 0x51524B31
"""Marks a database file as ours ("QRK1"), kept in SQLite's application_id."""

DDL = """
CREATE TABLE project (
    id          TEXT NOT NULL PRIMARY KEY,
    name        TEXT NOT NULL UNIQUE,
    root_path   TEXT NOT NULL,
    created_us  INTEGER NOT NULL,
    updated_us  INTEGER NOT NULL
);
CREATE TABLE run (
    pk              INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    project_id      TEXT NOT NULL REFERENCES project (id),
    name            TEXT,
    notes           TEXT,
    status          TEXT NOT NULL,
    attempt         INTEGER NOT NULL,
    parent_run_id   TEXT,
    lineage_root_run_id TEXT,
    run_path        TEXT NOT NULL,
    git_commit      TEXT,
    strict_mode     INTEGER NOT NULL,
    tags            TEXT NOT NULL,
    process         TEXT NOT NULL,
    config          TEXT,
    environment     TEXT,
    created_us      INTEGER NOT NULL,
    updated_us      INTEGER NOT NULL,
    ended_us        INTEGER,
    heartbeat_us    INTEGER NOT NULL
);
CREATE INDEX run_by_creation ON run (created_us DESC);
CREATE INDEX run_by_project ON run (project_id, created_us DESC);
CREATE TABLE writer (
    pk          INTEGER PRIMARY KEY,
    run_pk      INTEGER NOT NULL REFERENCES run (pk),
    id          TEXT NOT NULL,
    attempt     INTEGER NOT NULL,
    rank        INTEGER NOT NULL,
    started_us  INTEGER NOT NULL,
    head        INTEGER NOT NULL,
    UNIQUE (run_pk, id)
);
CREATE TABLE batch (
    pk          INTEGER PRIMARY KEY,
    writer_pk   INTEGER NOT NULL REFERENCES writer (pk),
    kind        TEXT NOT NULL,
    number      INTEGER NOT NULL,
    count       INTEGER NOT NULL,
    digest      BLOB NOT NULL,
    body        BLOB NOT NULL,
    UNIQUE (writer_pk, kind, number)
);
"""
