"""What the tests of keeping and deleting share: small stores, and what is in them, to the byte."""

import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from set_for_tests import SET_FOR_TESTS
from stores import list_tables

import quark
from quark.cli.main import cli
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.upkeep.trash import RunTrash
from quark_core.errors import QuarkError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [*os.environ]:
        if (name.startswith("QUARK_") and name not in SET_FOR_TESTS) or name in (
            "FORCE_COLOR",
            "TTY_COMPATIBLE",
            "COLUMNS",
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def start(monkeypatch):
    """Starts a run under an id of one's choice."""

    def start_it(root, run_id, project="vision", **arguments):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        session = quark.start_run(project=project, storage_dir=root, **arguments)
        monkeypatch.delenv("QUARK_RUN_ID")
        return session

    return start_it


@pytest.fixture
def make_run(start):
    """Makes one ended run through a real session, with points that do not compress."""

    def make(root, run_id, project="vision", *, points=300, **arguments):
        session = start(root, run_id, project, config={"run": run_id, "lr": 0.1}, **arguments)
        numbers = random.Random(run_id)
        with quark.MetricsLogger(session) as metrics, quark.EventLogger(session) as events:
            for step in range(points):
                metrics.log_many({"a": numbers.random(), "b": numbers.random()}, step=step)
            events.log("checkpoint_saved", payload={"run": run_id})
        session.add_tag(f"tag-{run_id}")
        session.end_run()

    return make


@pytest.fixture
def invoke():
    """Runs a command in this process; returns its output."""

    def call(*arguments, code=0, columns=200, answer=None):
        result = CliRunner().invoke(
            cli, list(map(str, arguments)), env={"COLUMNS": str(columns)}, input=answer
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture
def refuse(invoke):
    """Runs a command that must be refused; returns why."""

    def call(*arguments):
        with pytest.raises(QuarkError) as caught:
            invoke(*arguments)
        return str(caught.value)

    return call


class Store:
    """A store, seen from outside of what is tested."""

    def __init__(self, root):
        self.root = Path(root)
        self.folder = self.root / ".quark"
        self.trash = RunTrash(StoreLayout(self.root))

    def query(self, sql, *arguments):
        database = sqlite3.connect(self.folder / "quark.db")
        try:
            rows = database.execute(sql, arguments).fetchall()
            database.commit()
            return rows
        finally:
            database.close()

    def is_sound(self):
        return self.query("PRAGMA integrity_check") == [("ok",)]

    def size_bytes(self):
        """As `du` says it."""
        done = subprocess.run(
            ["du", "-s", "--block-size=1", self.folder], capture_output=True, text=True, check=True
        )
        return int(done.stdout.split()[0])

    def read_everything(self, run_id):
        """All that there is of a run, through the public interface, and its files, as one text."""
        session = quark.open_run(run_id, self.root)
        stored = session.open_run.reader.load_run(run_id).to_dict()
        # It is the project's, which other runs change too.
        del stored["project"]["updated_at"]
        # A copy of the store has it elsewhere.
        assert stored["run"].pop("run_path") == str(self.folder / "runs" / run_id)
        text = hashlib.sha256(json.dumps(stored, sort_keys=True, default=str).encode())
        metrics = quark.MetricsLogger(session).columns()
        for name in ("metric_key", "value", "step", "sequence", "time_us"):
            text.update(repr(metrics[name].tolist()).encode())
        for record in quark.EventLogger(session).read():
            text.update(repr(record).encode())
        files = self.folder / "runs" / run_id
        for path in sorted(files.rglob("*")):
            text.update(str(path.relative_to(files)).encode())
            text.update(path.read_bytes() if path.is_file() else b"")
        return f"{metrics.count} points: {text.hexdigest()}"

    def count_orphans(self):
        """Rows in any table that hang on a run, a writer or an analysis that is gone."""
        found = {}
        for table in list_tables():
            for _, _, target, column, key, *_ in self.query(f"PRAGMA foreign_key_list({table})"):
                (count,) = self.query(
                    f"SELECT count(*) FROM {table} WHERE {column} NOT IN"
                    f" (SELECT {key} FROM {target})"
                )[0]
                # The highest writer's number may be kept, in a row without content.
                kept = table == "writer" and target == "run"
                if count > kept:
                    found[f"{table}.{column}"] = count
        return found


@pytest.fixture
def look_into():
    return Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


@pytest.fixture
def spawn():
    """Starts Python programs, and ends those that a test leaves behind."""
    children = []

    def start_it(program, *arguments, **options):
        child = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        children.append(child)
        return child

    yield start_it
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
