-- Tables of the store, in SQLite's words; `tables.py` makes those of PostgreSQL and of older versions.
--
-- A writer is one process's stream into a run; `head` is the number of its newest acknowledged
-- batch and moves in the transaction that stores the batch. A batch is kept as it came (`batch`, the
-- inbox) until compaction turns it into chunks: for metrics one series of one writer (`name_pk` says
-- which), for every other kind rows in their order. What compaction needs to give batches back to a
-- mirror that is behind stays in `frame`.
--
-- `run_metric`, `run_tag`, `run_config`, `run_field`, `run_group_member` and `run_fingerprint` sum
-- up what search and lists ask for; they change in the transaction of the batch that changes them. A
-- record hidden by `resume_run(from_step=...)` is in no summary.
--
-- One column, constraint or statement's end stands in each line, and a comment in a line of its own.

-- Texts that workers share, one after the other; `count` is the number of the next one.
CREATE TABLE log (
    pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (pk),
    UNIQUE (name)
);

-- Names of metrics, each once in the store; 0 stands for none.
CREATE TABLE name (
    pk INTEGER NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (pk),
    UNIQUE (text)
);

CREATE TABLE project (
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    root_path TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    description TEXT,
    -- JSON: an object of values, and a sorted array of texts.
    fields TEXT,
    tags TEXT,
    PRIMARY KEY (id),
    UNIQUE (name)
);

-- Runs that were removed for good: what still arrives for them is let go.
CREATE TABLE removed (
    run_id TEXT NOT NULL,
    removed_us INTEGER NOT NULL,
    PRIMARY KEY (run_id)
);

-- Sweeps and their trials are no part of a run: they are there before their runs, and stay
-- when those are removed. The project need not be there yet.
CREATE TABLE sweep (
    id TEXT NOT NULL,
    -- Of project and name; see `derive_sweep_key`.
    name_key TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    -- JSON: what it was opened with.
    definition TEXT NOT NULL,
    max_failures INTEGER NOT NULL,
    state TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    PRIMARY KEY (id)
);
CREATE UNIQUE INDEX sweep_by_name ON sweep (name_key);
CREATE INDEX sweep_by_project ON sweep (project, created_us);

-- The first entry of each call names the call, and how many came by it.
CREATE TABLE entry (
    log_pk INTEGER NOT NULL,
    number INTEGER NOT NULL,
    text TEXT NOT NULL,
    request_id TEXT,
    appended INTEGER,
    PRIMARY KEY (log_pk, number),
    UNIQUE (log_pk, request_id),
    FOREIGN KEY(log_pk) REFERENCES log (pk)
);

CREATE TABLE run (
    pk INTEGER NOT NULL,
    id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    name TEXT,
    notes TEXT,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    parent_run_id TEXT,
    lineage_root_run_id TEXT,
    run_path TEXT NOT NULL,
    git_commit TEXT,
    strict_mode INTEGER NOT NULL,
    -- JSON: a sorted array of texts.
    tags TEXT NOT NULL,
    -- JSON: a `ProcessIdentity`, and its `exit_code` and `ending` once it has said them.
    process TEXT NOT NULL,
    config TEXT,
    environment TEXT,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    ended_us INTEGER,
    heartbeat_us INTEGER NOT NULL,
    -- Highest step of a visible metric.
    newest_step INTEGER,
    -- When it was put into the trash, which hides it from every list.
    trashed_us INTEGER,
    -- Label and full path of the storage root that it was started for, in a store of many.
    store_name TEXT,
    store_path TEXT,
    -- When it was archived, which leaves it out of searches that do not ask for it.
    archived_us INTEGER,
    -- JSON: the `StopRequest` that its newest attempt was sent first, or that it has seen one.
    stop TEXT,
    -- JSON: a sorted array of paths, and an object of values; NULL where there are none.
    group_paths TEXT,
    fields TEXT,
    -- What it was made of; see `quark_core.records.runs`.
    config_digest TEXT,
    structure_digest TEXT,
    code_digest TEXT,
    environment_digest TEXT,
    -- The run that it goes on from, and the last step that it has of that.
    fork_run_id TEXT,
    fork_step INTEGER,
    -- JSON: the `RunProgress` that its newest attempt has told last, until it ends.
    progress TEXT,
    -- The claim by which its newest attempt has a trial, or an earlier one had it.
    sweep_id TEXT,
    trial_number INTEGER,
    trial_token INTEGER,
    PRIMARY KEY (pk),
    UNIQUE (id),
    FOREIGN KEY(project_id) REFERENCES project (id)
);
CREATE INDEX run_by_code_digest ON run (code_digest);
CREATE INDEX run_by_config_digest ON run (config_digest);
-- With what hides a run, so that a list need not look at the rows that it leaves out.
CREATE INDEX run_by_creation ON run (created_us, trashed_us, archived_us);
CREATE INDEX run_by_environment_digest ON run (environment_digest);
CREATE INDEX run_by_project ON run (project_id, created_us, trashed_us, archived_us);
CREATE INDEX run_by_store ON run (store_name, created_us, trashed_us, archived_us);
CREATE INDEX run_by_structure_digest ON run (structure_digest);
CREATE INDEX run_by_trial ON run (sweep_id, trial_number);

-- What is said of a group; one that nobody has described is in no row, and its runs make it.
CREATE TABLE run_group (
    project_id TEXT NOT NULL,
    path TEXT NOT NULL,
    description TEXT,
    fields TEXT,
    tags TEXT,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    PRIMARY KEY (project_id, path),
    FOREIGN KEY(project_id) REFERENCES project (id)
)
 WITHOUT ROWID;

-- Times are those of the store's own clock; see `StoreConnection.read_clock_us`.
CREATE TABLE trial (
    sweep_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    -- By which call of `add_trials` it came.
    added_key TEXT NOT NULL,
    -- JSON: objects of values.
    parameters TEXT NOT NULL,
    origin TEXT NOT NULL,
    state TEXT NOT NULL,
    token INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    losses INTEGER NOT NULL,
    -- Of its newest claim: which call it was, by whom (JSON: a `ProcessIdentity`), when, for how
    -- long it holds without a word, and until when it does.
    request_id TEXT,
    worker TEXT,
    claimed_us INTEGER,
    lease_s DOUBLE,
    lease_us INTEGER,
    -- The run of its newest claim that has one; it may be gone.
    run_id TEXT,
    -- JSON: arrays of numbers.
    objective_values TEXT,
    constraint_values TEXT,
    step INTEGER,
    reason TEXT,
    settled_us INTEGER,
    PRIMARY KEY (sweep_id, number),
    FOREIGN KEY(sweep_id) REFERENCES sweep (id)
)
 WITHOUT ROWID;
CREATE INDEX trial_by_key ON trial (sweep_id, added_key);
-- One request is one claim, however often it comes and whoever has it at this moment.
CREATE UNIQUE INDEX trial_by_request ON trial (sweep_id, request_id);
CREATE INDEX trial_by_state ON trial (sweep_id, state, number);

CREATE TABLE attempt (
    run_pk INTEGER NOT NULL,
    number INTEGER NOT NULL,
    -- Points of earlier attempts from this step on are hidden.
    from_step INTEGER,
    started_us INTEGER NOT NULL,
    PRIMARY KEY (run_pk, number),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;

-- Outputs of an analyzer, visible all at once; readers take everything from the
-- newest generation that replaces what was before it.
CREATE TABLE generation (
    pk INTEGER NOT NULL,
    run_pk INTEGER NOT NULL,
    analyzer TEXT NOT NULL,
    number INTEGER NOT NULL,
    replaces INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    PRIMARY KEY (pk),
    UNIQUE (run_pk, analyzer, number),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
);

-- The configuration, flattened: `optimizer.lr` is a key. `type` is number, bool
-- (number holds 0 or 1), text, null or json (text holds it).
CREATE TABLE run_config (
    run_pk INTEGER NOT NULL,
    "key" TEXT NOT NULL,
    type TEXT NOT NULL,
    number DOUBLE,
    text TEXT,
    PRIMARY KEY (run_pk, "key"),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;
CREATE INDEX run_config_by_key ON run_config ("key");

-- Fields that were noted of a run, as `run_config` has its configuration.
CREATE TABLE run_field (
    run_pk INTEGER NOT NULL,
    "key" TEXT NOT NULL,
    type TEXT NOT NULL,
    number DOUBLE,
    text TEXT,
    PRIMARY KEY (run_pk, "key"),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;
CREATE INDEX run_field_by_key ON run_field ("key");

-- The newest fingerprint of each subject and key: of the highest attempt, in it of the lowest
-- rank, and of that the latest.
CREATE TABLE run_fingerprint (
    run_pk INTEGER NOT NULL,
    subject TEXT NOT NULL,
    "key" TEXT NOT NULL,
    digest TEXT NOT NULL,
    level TEXT NOT NULL,
    step INTEGER,
    -- JSON: figures, or NULL.
    sketch TEXT,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    time_us INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (run_pk, subject, "key"),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;
CREATE INDEX run_fingerprint_by_digest ON run_fingerprint (digest);
CREATE INDEX run_fingerprint_by_key ON run_fingerprint ("key");

CREATE TABLE run_group_member (
    run_pk INTEGER NOT NULL,
    path TEXT NOT NULL,
    PRIMARY KEY (run_pk, path),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;
CREATE INDEX run_group_member_by_path ON run_group_member (path);

-- Values that are not finite are counted in `non_finite`, and NULL where they come
-- first or last. Places are (attempt * 2^24 + rank, writer's start, sequence).
CREATE TABLE run_metric (
    run_pk INTEGER NOT NULL,
    name_pk INTEGER NOT NULL,
    count INTEGER NOT NULL,
    non_finite INTEGER NOT NULL,
    first DOUBLE,
    last DOUBLE,
    low DOUBLE,
    high DOUBLE,
    last_step INTEGER,
    last_us INTEGER NOT NULL,
    first_place INTEGER NOT NULL,
    first_started_us INTEGER NOT NULL,
    first_sequence INTEGER NOT NULL,
    last_place INTEGER NOT NULL,
    last_started_us INTEGER NOT NULL,
    last_sequence INTEGER NOT NULL,
    PRIMARY KEY (run_pk, name_pk),
    FOREIGN KEY(run_pk) REFERENCES run (pk),
    FOREIGN KEY(name_pk) REFERENCES name (pk)
)
 WITHOUT ROWID;
CREATE INDEX run_metric_by_name ON run_metric (name_pk, run_pk);

CREATE TABLE run_tag (
    run_pk INTEGER NOT NULL,
    tag TEXT NOT NULL,
    PRIMARY KEY (run_pk, tag),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;
CREATE INDEX run_tag_by_tag ON run_tag (tag);

CREATE TABLE writer (
    pk INTEGER NOT NULL,
    run_pk INTEGER NOT NULL,
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    head INTEGER NOT NULL,
    -- Lowest `from_step` of the attempts after this writer's.
    hidden_step INTEGER,
    PRIMARY KEY (pk),
    UNIQUE (run_pk, id),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
);

CREATE TABLE batch (
    pk INTEGER NOT NULL,
    writer_pk INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    count INTEGER NOT NULL,
    digest BLOB NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (pk),
    UNIQUE (writer_pk, kind, number),
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
);

-- The roll-up stands before the body, so that it is read without walking over it.
CREATE TABLE chunk (
    -- A number is never used again: readers remember chunks by it.
    pk INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    writer_pk INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name_pk INTEGER NOT NULL,
    first_sequence INTEGER NOT NULL,
    last_sequence INTEGER NOT NULL,
    -- -1 and -1 where no row has a step.
    step_low INTEGER NOT NULL,
    step_high INTEGER NOT NULL,
    count INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    rollup BLOB,
    body BLOB NOT NULL,
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
);
CREATE INDEX chunk_by_series ON chunk (writer_pk, kind, name_pk, first_sequence);

-- What could not be read and was set aside, with the reason. `source` is batch or chunk.
CREATE TABLE damaged (
    pk INTEGER NOT NULL,
    writer_pk INTEGER NOT NULL,
    source TEXT NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    count INTEGER NOT NULL,
    reason TEXT NOT NULL,
    found_us INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (pk),
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
);

-- Which records were in each of the batches that compaction took apart.
CREATE TABLE frame (
    writer_pk INTEGER NOT NULL,
    first_number INTEGER NOT NULL,
    last_number INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (writer_pk, first_number),
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
);

-- Sequence of the first hidden record of a kind: records of that kind that have
-- no step are hidden from there on.
CREATE TABLE hidden (
    writer_pk INTEGER NOT NULL,
    kind TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (writer_pk, kind),
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
)
 WITHOUT ROWID;

CREATE TABLE output (
    pk INTEGER NOT NULL,
    generation_pk INTEGER NOT NULL,
    kind TEXT NOT NULL,
    count INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (pk),
    FOREIGN KEY(generation_pk) REFERENCES generation (pk)
);
CREATE INDEX output_by_generation ON output (generation_pk, kind);
