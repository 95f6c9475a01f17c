"""Tables of the store for SQLite and PostgreSQL; run as a module to renew schema.sql.

A writer is one process's stream into a run; `head` is the number of its
newest acknowledged batch and moves in the transaction that stores the batch.
A batch is kept as it came (`batch`, the inbox) until compaction turns it into
chunks: for metrics one series of one writer (`name_pk` says which), for every
other kind rows in their order. What compaction needs to give batches back to a
mirror that is behind stays in `frame`.

`run_metric`, `run_tag`, `run_config`, `run_field`, `run_group_member` and
`run_fingerprint` sum up what search and lists ask for; they change in the
transaction of the batch that changes them. A record hidden by
`resume_run(from_step=...)` is in no summary.

SQLite is used through its driver on the hot path, with `schema.sql`, which is
made from this module and held equal to it by a test. PostgreSQL has a schema of
these tables for each workspace; its keys are drawn at random, without sequences.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from quark_core.records.schema import CURRENT_SCHEMA_VERSION

METADATA = MetaData()

# SQLite numbers rows by itself only where the type is INTEGER.
_Number = BigInteger().with_variant(Integer(), "sqlite")
# By code points, as SQLite compares: a database's own order differs from one to the next.
_Text = Text().with_variant(Text(collation="C"), "postgresql")


def _own_key() -> Column[int]:
    # PostgreSQL must make no sequence of it: keys are drawn at random there.
    return Column("pk", _Number, primary_key=True, autoincrement=False)


def _key(name: str, *target: str) -> Column[int]:
    return Column(name, _Number, *(ForeignKey(t) for t in target), nullable=False)


project = Table(
    "project",
    METADATA,
    Column("id", _Text, primary_key=True),
    Column("name", _Text, nullable=False, unique=True),
    Column("root_path", _Text, nullable=False),
    Column("created_us", _Number, nullable=False),
    Column("updated_us", _Number, nullable=False),
    Column("description", _Text),
    # JSON: an object of values, and a sorted array of texts.
    Column("fields", _Text),
    Column("tags", _Text),
)

run = Table(
    "run",
    METADATA,
    _own_key(),
    Column("id", _Text, nullable=False, unique=True),
    Column("project_id", _Text, ForeignKey("project.id"), nullable=False),
    Column("name", _Text),
    Column("notes", _Text),
    Column("status", _Text, nullable=False),
    Column("attempt", _Number, nullable=False),
    Column("parent_run_id", _Text),
    Column("lineage_root_run_id", _Text),
    Column("run_path", _Text, nullable=False),
    Column("git_commit", _Text),
    Column("strict_mode", _Number, nullable=False),
    # JSON: a sorted array of texts.
    Column("tags", _Text, nullable=False),
    # JSON: a `ProcessIdentity`, and its `exit_code` and `ending` once it has said them.
    Column("process", _Text, nullable=False),
    Column("config", _Text),
    Column("environment", _Text),
    Column("created_us", _Number, nullable=False),
    Column("updated_us", _Number, nullable=False),
    Column("ended_us", _Number),
    Column("heartbeat_us", _Number, nullable=False),
    # Highest step of a visible metric.
    Column("newest_step", _Number),
    # When it was put into the trash, which hides it from every list.
    Column("trashed_us", _Number),
    # Label and full path of the storage root that it was started for, in a store of many.
    Column("store_name", _Text),
    Column("store_path", _Text),
    # When it was archived, which leaves it out of searches that do not ask for it.
    Column("archived_us", _Number),
    # JSON: the `StopRequest` that its newest attempt was sent first, or that it has seen one.
    Column("stop", _Text),
    # JSON: a sorted array of paths, and an object of values; NULL where there are none.
    Column("group_paths", _Text),
    Column("fields", _Text),
    # What it was made of; see `quark_core.records.runs`.
    Column("config_digest", _Text),
    Column("structure_digest", _Text),
    Column("code_digest", _Text),
    Column("environment_digest", _Text),
    # The run that it goes on from, and the last step that it has of that.
    Column("fork_run_id", _Text),
    Column("fork_step", _Number),
    # JSON: the `RunProgress` that its newest attempt has told last, until it ends.
    Column("progress", _Text),
    # The claim by which its newest attempt has a trial, or an earlier one had it.
    Column("sweep_id", _Text),
    Column("trial_number", _Number),
    Column("trial_token", _Number),
    # With what hides a run, so that a list need not look at the rows that it leaves out.
    Index("run_by_creation", "created_us", "trashed_us", "archived_us"),
    Index("run_by_project", "project_id", "created_us", "trashed_us", "archived_us"),
    Index("run_by_store", "store_name", "created_us", "trashed_us", "archived_us"),
    Index("run_by_config_digest", "config_digest"),
    Index("run_by_structure_digest", "structure_digest"),
    Index("run_by_code_digest", "code_digest"),
    Index("run_by_environment_digest", "environment_digest"),
    Index("run_by_trial", "sweep_id", "trial_number"),
)

attempt = Table(
    "attempt",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("number", _Number, primary_key=True),
    # Points of earlier attempts from this step on are hidden.
    Column("from_step", _Number),
    Column("started_us", _Number, nullable=False),
    sqlite_with_rowid=False,
)

run_tag = Table(
    "run_tag",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("tag", _Text, primary_key=True),
    Index("run_tag_by_tag", "tag"),
    sqlite_with_rowid=False,
)

# The configuration, flattened: `optimizer.lr` is a key. `type` is number, bool
# (number holds 0 or 1), text, null or json (text holds it).
run_config = Table(
    "run_config",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("key", _Text, primary_key=True),
    Column("type", _Text, nullable=False),
    Column("number", Double),
    Column("text", _Text),
    Index("run_config_by_key", "key"),
    sqlite_with_rowid=False,
)

# Fields that were noted of a run, as `run_config` has its configuration.
run_field = Table(
    "run_field",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("key", _Text, primary_key=True),
    Column("type", _Text, nullable=False),
    Column("number", Double),
    Column("text", _Text),
    Index("run_field_by_key", "key"),
    sqlite_with_rowid=False,
)

# What is said of a group; one that nobody has described is in no row, and its runs make it.
run_group = Table(
    "run_group",
    METADATA,
    Column("project_id", _Text, ForeignKey("project.id"), primary_key=True),
    Column("path", _Text, primary_key=True),
    Column("description", _Text),
    Column("fields", _Text),
    Column("tags", _Text),
    Column("created_us", _Number, nullable=False),
    Column("updated_us", _Number, nullable=False),
    sqlite_with_rowid=False,
)

run_group_member = Table(
    "run_group_member",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("path", _Text, primary_key=True),
    Index("run_group_member_by_path", "path"),
    sqlite_with_rowid=False,
)

# The newest fingerprint of each subject and key: of the highest attempt, in it of the lowest
# rank, and of that the latest.
run_fingerprint = Table(
    "run_fingerprint",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("subject", _Text, primary_key=True),
    Column("key", _Text, primary_key=True),
    Column("digest", _Text, nullable=False),
    Column("level", _Text, nullable=False),
    Column("step", _Number),
    # JSON: figures, or NULL.
    Column("sketch", _Text),
    Column("attempt", _Number, nullable=False),
    Column("rank", _Number, nullable=False),
    Column("time_us", _Number, nullable=False),
    Column("sequence", _Number, nullable=False),
    Index("run_fingerprint_by_digest", "digest"),
    Index("run_fingerprint_by_key", "key"),
    sqlite_with_rowid=False,
)

# Names of metrics, each once in the store; 0 stands for none.
name = Table(
    "name",
    METADATA,
    _own_key(),
    Column("text", _Text, nullable=False, unique=True),
)

# Values that are not finite are counted in `non_finite`, and NULL where they come
# first or last. Places are (attempt * 2^24 + rank, writer's start, sequence).
run_metric = Table(
    "run_metric",
    METADATA,
    Column("run_pk", _Number, ForeignKey("run.pk"), primary_key=True),
    Column("name_pk", _Number, ForeignKey("name.pk"), primary_key=True),
    Column("count", _Number, nullable=False),
    Column("non_finite", _Number, nullable=False),
    Column("first", Double),
    Column("last", Double),
    Column("low", Double),
    Column("high", Double),
    Column("last_step", _Number),
    Column("last_us", _Number, nullable=False),
    Column("first_place", _Number, nullable=False),
    Column("first_started_us", _Number, nullable=False),
    Column("first_sequence", _Number, nullable=False),
    Column("last_place", _Number, nullable=False),
    Column("last_started_us", _Number, nullable=False),
    Column("last_sequence", _Number, nullable=False),
    Index("run_metric_by_name", "name_pk", "run_pk"),
    sqlite_with_rowid=False,
)

writer = Table(
    "writer",
    METADATA,
    _own_key(),
    _key("run_pk", "run.pk"),
    Column("id", _Text, nullable=False),
    Column("attempt", _Number, nullable=False),
    Column("rank", _Number, nullable=False),
    Column("started_us", _Number, nullable=False),
    Column("head", _Number, nullable=False),
    # Lowest `from_step` of the attempts after this writer's.
    Column("hidden_step", _Number),
    UniqueConstraint("run_pk", "id"),
)

# Sequence of the first hidden record of a kind: records of that kind that have
# no step are hidden from there on.
hidden = Table(
    "hidden",
    METADATA,
    Column("writer_pk", _Number, ForeignKey("writer.pk"), primary_key=True),
    Column("kind", _Text, primary_key=True),
    Column("sequence", _Number, nullable=False),
    sqlite_with_rowid=False,
)

batch = Table(
    "batch",
    METADATA,
    _own_key(),
    _key("writer_pk", "writer.pk"),
    Column("kind", _Text, nullable=False),
    Column("number", _Number, nullable=False),
    Column("count", _Number, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("writer_pk", "kind", "number"),
)

# The roll-up stands before the body, so that it is read without walking over it.
chunk = Table(
    "chunk",
    METADATA,
    _own_key(),
    _key("writer_pk", "writer.pk"),
    Column("kind", _Text, nullable=False),
    Column("name_pk", _Number, nullable=False),
    Column("first_sequence", _Number, nullable=False),
    Column("last_sequence", _Number, nullable=False),
    # -1 and -1 where no row has a step.
    Column("step_low", _Number, nullable=False),
    Column("step_high", _Number, nullable=False),
    Column("count", _Number, nullable=False),
    Column("codec", _Number, nullable=False),
    Column("rollup", LargeBinary),
    Column("body", LargeBinary, nullable=False),
    Index("chunk_by_series", "writer_pk", "kind", "name_pk", "first_sequence"),
    # A number is never used again: readers remember chunks by it.
    sqlite_autoincrement=True,
)

# Which records were in each of the batches that compaction took apart.
frame = Table(
    "frame",
    METADATA,
    Column("writer_pk", _Number, ForeignKey("writer.pk"), primary_key=True),
    Column("first_number", _Number, primary_key=True),
    Column("last_number", _Number, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

# What could not be read and was set aside, with the reason. `source` is batch or chunk.
damaged = Table(
    "damaged",
    METADATA,
    _own_key(),
    _key("writer_pk", "writer.pk"),
    Column("source", _Text, nullable=False),
    Column("kind", _Text, nullable=False),
    Column("number", _Number, nullable=False),
    Column("count", _Number, nullable=False),
    Column("reason", _Text, nullable=False),
    Column("found_us", _Number, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

# Outputs of an analyzer, visible all at once; readers take everything from the
# newest generation that replaces what was before it.
generation = Table(
    "generation",
    METADATA,
    _own_key(),
    _key("run_pk", "run.pk"),
    Column("analyzer", _Text, nullable=False),
    Column("number", _Number, nullable=False),
    Column("replaces", _Number, nullable=False),
    Column("created_us", _Number, nullable=False),
    UniqueConstraint("run_pk", "analyzer", "number"),
)

output = Table(
    "output",
    METADATA,
    _own_key(),
    _key("generation_pk", "generation.pk"),
    Column("kind", _Text, nullable=False),
    Column("count", _Number, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("output_by_generation", "generation_pk", "kind"),
)

# Runs that were removed for good: what still arrives for them is let go.
removed = Table(
    "removed",
    METADATA,
    Column("run_id", _Text, primary_key=True),
    Column("removed_us", _Number, nullable=False),
)

# Sweeps and their trials are no part of a run: they are there before their runs, and stay
# when those are removed. The project need not be there yet.
sweep = Table(
    "sweep",
    METADATA,
    Column("id", _Text, primary_key=True),
    # Of project and name; see `derive_sweep_key`.
    Column("name_key", _Text, nullable=False),
    Column("project", _Text, nullable=False),
    Column("name", _Text, nullable=False),
    # JSON: what it was opened with.
    Column("definition", _Text, nullable=False),
    Column("max_failures", _Number, nullable=False),
    Column("state", _Text, nullable=False),
    Column("created_us", _Number, nullable=False),
    Column("updated_us", _Number, nullable=False),
    Index("sweep_by_name", "name_key", unique=True),
    Index("sweep_by_project", "project", "created_us"),
)

# Times are those of the store's own clock; see `StoreConnection.read_clock_us`.
trial = Table(
    "trial",
    METADATA,
    Column("sweep_id", _Text, ForeignKey("sweep.id"), primary_key=True),
    Column("number", _Number, primary_key=True),
    # By which call of `add_trials` it came.
    Column("added_key", _Text, nullable=False),
    # JSON: objects of values.
    Column("parameters", _Text, nullable=False),
    Column("origin", _Text, nullable=False),
    Column("state", _Text, nullable=False),
    Column("token", _Number, nullable=False),
    Column("failures", _Number, nullable=False),
    Column("losses", _Number, nullable=False),
    # Of its newest claim: which call it was, by whom (JSON: a `ProcessIdentity`), when, for how
    # long it holds without a word, and until when it does.
    Column("request_id", _Text),
    Column("worker", _Text),
    Column("claimed_us", _Number),
    Column("lease_s", Double),
    Column("lease_us", _Number),
    # The run of its newest claim that has one; it may be gone.
    Column("run_id", _Text),
    # JSON: arrays of numbers.
    Column("objective_values", _Text),
    Column("constraint_values", _Text),
    Column("step", _Number),
    Column("reason", _Text),
    Column("settled_us", _Number),
    Index("trial_by_state", "sweep_id", "state", "number"),
    Index("trial_by_key", "sweep_id", "added_key"),
    # One request is one claim, however often it comes and whoever has it at this moment.
    Index("trial_by_request", "sweep_id", "request_id", unique=True),
    sqlite_with_rowid=False,
)

# Texts that workers share, one after the other; `count` is the number of the next one.
log = Table(
    "log",
    METADATA,
    _own_key(),
    Column("name", _Text, nullable=False, unique=True),
    Column("count", _Number, nullable=False),
)

# The first entry of each call names the call, and how many came by it.
entry = Table(
    "entry",
    METADATA,
    Column("log_pk", _Number, ForeignKey("log.pk"), primary_key=True),
    Column("number", _Number, primary_key=True),
    Column("text", _Text, nullable=False),
    Column("request_id", _Text),
    Column("appended", _Number),
    UniqueConstraint("log_pk", "request_id"),
)


ADDED: dict[int, frozenset[str]] = {
    6: frozenset(
        "sweep trial log entry run.sweep_id run.trial_number run.trial_token run_by_trial".split()
    ),
}
"""What each version has that the one before has not: tables, columns of others, and indexes.

A version only adds. What it adds is described above, as all tables are.
"""

SQLITE = sqlite.dialect()
POSTGRESQL = postgresql.dialect()  # type: ignore[no-untyped-call]
_HEAD = (
    "-- Made from tables.py by `python -m quark_backends.store.databases.tables`; do not edit.\n"
)


def list_statements(
    dialect: Dialect, version: int = CURRENT_SCHEMA_VERSION, *, since: int | None = None
) -> list[str]:
    """The statements that make the tables of a version.

    Args:
        dialect: `SQLITE` or `POSTGRESQL`.
        version: The version.
        since: The version of the tables that are there; None where there are none.
    """
    later = _find_added(version)
    new = None if since is None else _find_added(since) - later
    statements = []
    for table in _leave_out(later).sorted_tables:
        is_new = new is None or table.name in new
        for column in table.columns:
            if new is not None and f"{table.name}.{column.name}" in new:
                text = CreateColumn(column).compile(dialect=dialect)
                statements.append(f"ALTER TABLE {table.name} ADD COLUMN {text}")
        if is_new:
            statements.append(str(CreateTable(table).compile(dialect=dialect)).strip())
        statements += [
            str(CreateIndex(index).compile(dialect=dialect)).strip()
            for index in sorted(table.indexes, key=lambda index: str(index.name))
            if index.name not in later and (is_new or index.name in (new or ()))
        ]
    return statements


def _leave_out(names: frozenset[str]) -> MetaData:
    """The tables without some of them, and without some of their columns."""
    if not names:
        return METADATA
    metadata = MetaData()
    for table in METADATA.sorted_tables:
        if table.name not in names:
            for column in table.to_metadata(metadata).columns:
                # A column of the database's own is not named where a table is made.
                column.system = f"{table.name}.{column.name}" in names
    return metadata


def _find_added(version: int) -> frozenset[str]:
    """What versions after one have added."""
    return frozenset().union(*(names for added, names in ADDED.items() if added > version))


def render_schema() -> str:
    """The statements that make all tables in SQLite."""
    lines = [
        line.rstrip().replace("\t", "    ")
        for statement in list_statements(SQLITE)
        for line in f"{statement};".splitlines()
    ]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("schema.sql").write_text(render_schema(), "utf-8")
