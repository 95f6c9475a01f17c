-- Made from tables.py by `python -m quark_backends.store.databases.tables`; do not edit.
CREATE TABLE log (
    pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (pk),
    UNIQUE (name)
);
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
    fields TEXT,
    tags TEXT,
    PRIMARY KEY (id),
    UNIQUE (name)
);
CREATE TABLE removed (
    run_id TEXT NOT NULL,
    removed_us INTEGER NOT NULL,
    PRIMARY KEY (run_id)
);
CREATE TABLE sweep (
    id TEXT NOT NULL,
    name_key TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    definition TEXT NOT NULL,
    max_failures INTEGER NOT NULL,
    state TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    PRIMARY KEY (id)
);
CREATE UNIQUE INDEX sweep_by_name ON sweep (name_key);
CREATE INDEX sweep_by_project ON sweep (project, created_us);
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
    tags TEXT NOT NULL,
    process TEXT NOT NULL,
    config TEXT,
    environment TEXT,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    ended_us INTEGER,
    heartbeat_us INTEGER NOT NULL,
    newest_step INTEGER,
    trashed_us INTEGER,
    store_name TEXT,
    store_path TEXT,
    archived_us INTEGER,
    stop TEXT,
    group_paths TEXT,
    fields TEXT,
    config_digest TEXT,
    structure_digest TEXT,
    code_digest TEXT,
    environment_digest TEXT,
    fork_run_id TEXT,
    fork_step INTEGER,
    progress TEXT,
    sweep_id TEXT,
    trial_number INTEGER,
    trial_token INTEGER,
    PRIMARY KEY (pk),
    UNIQUE (id),
    FOREIGN KEY(project_id) REFERENCES project (id)
);
CREATE INDEX run_by_code_digest ON run (code_digest);
CREATE INDEX run_by_config_digest ON run (config_digest);
CREATE INDEX run_by_creation ON run (created_us, trashed_us, archived_us);
CREATE INDEX run_by_environment_digest ON run (environment_digest);
CREATE INDEX run_by_project ON run (project_id, created_us, trashed_us, archived_us);
CREATE INDEX run_by_store ON run (store_name, created_us, trashed_us, archived_us);
CREATE INDEX run_by_structure_digest ON run (structure_digest);
CREATE INDEX run_by_trial ON run (sweep_id, trial_number);
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
CREATE TABLE trial (
    sweep_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    added_key TEXT NOT NULL,
    parameters TEXT NOT NULL,
    origin TEXT NOT NULL,
    state TEXT NOT NULL,
    token INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    losses INTEGER NOT NULL,
    request_id TEXT,
    worker TEXT,
    claimed_us INTEGER,
    lease_s DOUBLE,
    lease_us INTEGER,
    run_id TEXT,
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
CREATE UNIQUE INDEX trial_by_request ON trial (sweep_id, request_id);
CREATE INDEX trial_by_state ON trial (sweep_id, state, number);
CREATE TABLE attempt (
    run_pk INTEGER NOT NULL,
    number INTEGER NOT NULL,
    from_step INTEGER,
    started_us INTEGER NOT NULL,
    PRIMARY KEY (run_pk, number),
    FOREIGN KEY(run_pk) REFERENCES run (pk)
)
 WITHOUT ROWID;
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
CREATE TABLE run_fingerprint (
    run_pk INTEGER NOT NULL,
    subject TEXT NOT NULL,
    "key" TEXT NOT NULL,
    digest TEXT NOT NULL,
    level TEXT NOT NULL,
    step INTEGER,
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
CREATE TABLE chunk (
    pk INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    writer_pk INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name_pk INTEGER NOT NULL,
    first_sequence INTEGER NOT NULL,
    last_sequence INTEGER NOT NULL,
    step_low INTEGER NOT NULL,
    step_high INTEGER NOT NULL,
    count INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    rollup BLOB,
    body BLOB NOT NULL,
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
);
CREATE INDEX chunk_by_series ON chunk (writer_pk, kind, name_pk, first_sequence);
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
CREATE TABLE frame (
    writer_pk INTEGER NOT NULL,
    first_number INTEGER NOT NULL,
    last_number INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (writer_pk, first_number),
    FOREIGN KEY(writer_pk) REFERENCES writer (pk)
);
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
