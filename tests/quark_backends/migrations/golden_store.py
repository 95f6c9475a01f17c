"""Makes the store that is kept of a released version, and says what must be read back.

Run once per schema version, with the code of that version on the path:

    python tests/quark_backends/migrations/golden_store.py tests/assets/stores/<version>

It leaves `store/`, which is what was the `.quark` folder, and `expected.json`.
Only the public API is used, so that the tests describe an old store with the
code of today and compare.
"""

import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import warnings
from pathlib import Path

import quark
from quark_core.runs.backend_choice import open_reader

RUNS = ("baseline", "diverged", "stopped", "resumed", "tuned", "killed")

CONFIG = {
    "seed": 7,
    "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.999], "amsgrad": False},
    "schedule": {"warmup": {"steps": 100, "from": 0.0}, "decay": None},
    "data": "imagenet",
}


def describe_store(storage_dir):
    """All runs of a golden store with their records, as JSON-like values."""
    return {run_id: describe_run(run_id, storage_dir) for run_id in RUNS}


def describe_run(run_id, storage_dir):
    session = quark.open_run(run_id, storage_dir)
    run = open_reader(Path(storage_dir)).load_run(run_id)
    metrics = {}
    # All that was stored: of repeated steps readers leave out the earlier points by default.
    for record in quark.MetricsLogger(session).read(include_non_finite=True, all_attempts=True):
        # As text, since NaN is equal to nothing.
        row = [repr(record.value), record.step, record.epoch, record.attempt, record.time_us]
        metrics.setdefault(record.metric_key, []).append(row)
    events = [
        [record.event_type, record.severity, record.step, record.attempt, record.payload]
        for record in quark.EventLogger(session).read()
    ]
    return {
        "project": run.project.name,
        "status": run.run.status,
        "state": run.state,
        "attempt": run.run.attempt,
        "name": run.run.name,
        "notes": run.run.notes,
        "parent_run_id": run.run.parent_run_id,
        "lineage_root_run_id": run.run.lineage_root_run_id,
        "tags": list(run.run.tags),
        "config": None
        if run.config is None
        else {"values": run.config.values, "notes": list(run.config.notes)},
        "created_at": run.run.created_at,
        "ended_at": run.run.ended_at,
        "metrics": metrics,
        "events": events,
    }


def start(run_id, storage_dir, **arguments):
    os.environ["QUARK_RUN_ID"] = run_id
    try:
        return quark.start_run(storage_dir=storage_dir, **arguments)
    finally:
        del os.environ["QUARK_RUN_ID"]


def log_curve(session, first_step, last_step, offset=0.0):
    metrics = quark.MetricsLogger(session, batch_size=20)
    for step in range(first_step, last_step):
        epoch = step // 10
        metrics.log_many(
            {"train/loss": offset + 1 / (1 + step), "lr": 3e-4}, step=step, epoch=epoch
        )
        if step % 10 == 9:
            metrics.log("accuracy", 0.5 + step / 200, namespace="val", epoch=epoch)
    metrics.flush()
    return metrics


def make_runs(storage_dir):
    baseline = start(
        "baseline",
        storage_dir,
        project="vision",
        config=CONFIG,
        tags=["best", "größe-😀", "a,b"],
        name="ResNet-50, first try",
        notes="The one that all others are compared with.",
    )
    metrics = log_curve(baseline, 0, 60)
    metrics.log("mean@1", 0.25, step=59, metadata={"of": ["train", "val"]})
    metrics.log("train/größe in m²", -0.0, step=59, description="an odd name")
    metrics.log("gap", float("nan"), step=10)
    metrics.log("gap", float("inf"), step=11)
    metrics.log("gap", 5e-324, step=12)
    metrics.log("gap", 1.7976931348623157e308, step=2**62)
    baseline.add_tag("späte wahl")
    baseline.add_log("checkpoint kept", step=59, payload={"path": "last.pt", "size": [1, {"b": 2}]})
    quark.EventLogger(baseline).log("learning_rate_changed", severity="warning", step=30, epoch=3)
    baseline.end_run()

    diverged = start("diverged", storage_dir, project="vision", config={"seed": 8})
    quark.MetricsLogger(diverged).log("train/loss", float("nan"), step=0)
    diverged.end_run("failed")

    stopped = start("stopped", storage_dir, project="language")
    log_curve(stopped, 0, 5)
    stopped.end_run("interrupted")

    resumed = start("resumed", storage_dir, project="language", config=CONFIG, tags=["long"])
    log_curve(resumed, 0, 30)
    resumed.end_run("interrupted")
    # Begins again before the last step, so steps are there twice.
    for first_step, last_step, offset in ((20, 40, 0.5), (40, 50, 0.25)):
        resumed = quark.resume_run(run_id="resumed", storage_dir=storage_dir)
        log_curve(resumed, first_step, last_step, offset)
        resumed.end_run("failed" if offset == 0.5 else "completed")

    tuned = start(
        "tuned", storage_dir, project="vision", parent_run_id="baseline", tags=["best", "tuned"]
    )
    log_curve(tuned, 60, 70)
    tuned.end_run()


def make_killed_run(storage_dir):
    session = start("killed", storage_dir, project="vision", config={"seed": 9}, tags=["cut"])
    log_curve(session, 0, 15)
    session.add_log("about to die", identifier="Error", step=14)
    quark.EventLogger(session).flush()
    os.kill(os.getpid(), signal.SIGKILL)


def keep(storage_dir, target):
    """Put the database and its marker, which are the store, into a folder."""
    source = storage_dir / ".quark"
    database = sqlite3.connect(source / "quark.db", isolation_level=None)
    # One whole file; it stays in WAL mode, as Quark leaves it.
    assert database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    database.close()
    store = target / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    for name in ("quark.db", "store.json"):
        shutil.copy(source / name, store / name)
    described = describe_store(storage_dir)
    (target / "expected.json").write_text(
        json.dumps(described, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    place = Path(os.environ.get("GOLDEN_STORAGE_DIR") or tempfile.mkdtemp())
    if sys.argv[1] == "--make":
        make_runs(place)
        make_killed_run(place)
    elif sys.argv[1] == "--keep":
        keep(place, Path(sys.argv[2]))
    else:
        import subprocess

        program = [sys.executable, __file__]
        environment = {**os.environ, "GOLDEN_STORAGE_DIR": str(place)}
        made = subprocess.run([*program, "--make"], env=environment, check=False)
        assert made.returncode == -signal.SIGKILL
        subprocess.run([*program, "--keep", sys.argv[1]], env=environment, check=True)
