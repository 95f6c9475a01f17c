"""What somebody else's store says a run was made of is shown harmlessly, or refused by name."""

import contextlib
import itertools
import json
import os
import sqlite3
import traceback

import pytest
from hostile_runs import EVIL, FINE, find_unfit, run_command
from set_for_tests import SET_FOR_TESTS

import quark
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import AggregateRecord, FingerprintRecord

TEXT = f"x{EVIL}{FINE}"
NONSENSE = [
    None,
    {},
    {"root": [1], "main": {"a": 1}, "files": "many", "manifest": TEXT, "outside": TEXT},
    {"root": TEXT, "main": TEXT, "outside": [TEXT, 1], "changed": [[1]], "left_out": {TEXT: [1]}},
    {"manifest": "0" * 64, "left_out": [TEXT], "changed": 1, "order": TEXT, "epoch": "x"},
    {
        "traced": True,
        "module": 1,
        "qualname": [TEXT],
        "text": 5,
        "names": 7,
        "file": {},
        "first_line": "a",
    },
    {
        "traced": True,
        "module": TEXT,
        "qualname": TEXT,
        "text": TEXT,
        "names": [TEXT, 1],
        "file": TEXT,
    },
    {"traced": True, "text": "def f(:", "names": ["quark"], "file": "../../etc/passwd"},
    {"read": TEXT, "known": [1, TEXT]},
    {"read": [TEXT], "known": {"a": 1}, "pass": -1, "marks": TEXT, "batches": TEXT, "samples": []},
    {"pass": "x", "marks": [[TEXT, 1], 2, [1]], "whole": TEXT, "order": 1},
    {"unseen": TEXT, "files": [], "bytes": TEXT, "length": TEXT, "rows": {}},
]
SKETCHES = [
    None,
    {"mean": TEXT, "std": [], "values": TEXT},
    {"form": TEXT, "parts": [TEXT, 1, {"path": 1}], "numbers": {"mean": None}},
    {"parts": {TEXT: {"mean": "nan", "count": -1, "values": [TEXT]}}, "dtype": 3, "shape": TEXT},
]
KEYS = {
    "code": ["sources", "git_diff", "traced", TEXT],
    "data": ["train", TEXT],
    "output": ["result", TEXT],
    "environment": ["environment", "config_reads", TEXT],
    TEXT: ["other"],
}


def list_fingerprints(session, shift):
    head = (session.run_id, session.open_run.origin.writer_id, 0, 0)
    number = itertools.count()
    for subject, keys in KEYS.items():
        for key in keys:
            for index, metadata in enumerate(NONSENSE):
                sketch = SKETCHES[(index + shift) % len(SKETCHES)]
                yield FingerprintRecord(
                    *head, next(number), 1, subject, key, f"{TEXT}{shift}{index}",
                    TEXT if index % 2 else "stream:contents", index - 3 if index % 4 else None,
                    sketch and JsonObject(sketch), metadata and JsonObject(metadata),
                )  # fmt: skip


def list_aggregates(session):
    head = (session.run_id, session.open_run.origin.writer_id, 0, 0)
    yield AggregateRecord(
        *head, 0, 1, TEXT, TEXT, TEXT, -5, 9, -9, -1, float("nan"), -1.0, float("inf"), -1.0,
        None, 1e308, -1, -2, TEXT, JsonObject({TEXT: TEXT, "0": -1}), (float("nan"),), (1, 2, 3),
    )  # fmt: skip
    yield AggregateRecord(
        *head, 1, 1, "timer", "timer", "s", 2**62, None, None, 2**62, 1e308, 1e308, 5.0, 1.0,
        None, None, 0, 0, None, JsonObject({"b": [1, TEXT]}), (), (),
    )  # fmt: skip


def log_run(root, shift):
    session = quark.start_run(
        project="p", storage_dir=root, config={"lr": shift, TEXT: TEXT, "seed": shift},
        group="fine", fork_from=None, version=TEXT,
    )  # fmt: skip
    metrics = quark.MetricsLogger(session)
    for step in range(20):
        metrics.log("val/loss", 1.0 / (step + 1 + shift), step=step)
    session.annotate({"fine": TEXT, "deep": {"x": [TEXT]}})
    for records in (list_fingerprints(session, shift), list_aggregates(session)):
        for record in records:
            with contextlib.suppress(quark.SchemaValidationError):
                session.write([record])
    session.end_run()
    return session.run_id


def damage(root, run_id):
    """Put into the rows of a run what none of Quark's own writers would."""
    rows = {
        "group_paths": ['["\\u001b[31m", 1, null]', "{}", "not json", "[[]]", "5"],
        "fields": ['{"\\u001b[2J": {"a": "\\u0007"}}', "[]", "not json", "7", '{"a": NaN}'],
        "progress": [
            '{"done": "x"}',
            "[]",
            "not json",
            '{"done": -1, "total": 0}',
            '"\\u001b[31m"',
        ],
        "config_digest": [TEXT, "", "%"],
        "fork_step": [-5, "x"],
        "fork_run_id": [TEXT, run_id],
    }
    with contextlib.closing(sqlite3.connect(root / ".quark" / "quark.db")) as database:
        known = {row[1] for row in database.execute("PRAGMA table_info(run)")}
        assert set(rows) <= known
        tables = [
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if "group" in name or "field" in name or "project" in name
        ]
        assert tables
    return [(column, value) for column, values in rows.items() for value in values]


SHORT = ["show RUN", "runs", "groups", "why RUN OTHER"]
COMMANDS = [
    "show RUN", "show RUN --json", "why RUN OTHER", "why RUN OTHER --json", "why RUN", "runs",
    "runs --group-by config", "runs --group-by group", "runs --group-by field.fine", "runs --json",
    "groups", "groups --json", "sources RUN", "sources RUN --json", "sources RUN --diff OTHER",
    "sources RUN --git-diff", "sources RUN --restore OUT", "traces p", "traces p --diff",
    "traces p --json", "report RUN OTHER -o OUT2", "compare RUN OTHER", "logs RUN",
    "follow RUN --once --no-analyze", "edit RUN --field a=1 --group fine/b",
]  # fmt: skip


def walk(monkeypatch, root, out, place, commands):
    """Run the commands; what was wrong with any of them."""
    wrong = []
    for line in commands:
        names = {**place, "OUT": str(out / "a"), "OUT2": str(out / "b")}
        words = [names.get(word, word) for word in line.split()]
        try:
            status, stdout, stderr = run_command(monkeypatch, *words, "-d", str(root))
        except Exception as error:
            wrong.append((line, repr(error), find_place(error)))
            continue
        if status not in (0, 1, 2, 3) or "Traceback" in stdout + stderr or not stdout + stderr:
            wrong.append((line, status, stderr[-300:]))
        wrong += [(line, unfit[:3]) for unfit in map(find_unfit, (stdout, stderr)) if unfit]
        if "--json" in words and status == 0:
            json.loads(stdout)
    return wrong


def find_place(error):
    """Where an error comes from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def ask(root, place):
    """The functions that the commands stand on: an answer, or an error of Quark's."""
    run, other, wrong = place["RUN"], place["OTHER"], []
    for call in (
        lambda: quark.explain_change(run, other, storage_dir=root),
        lambda: quark.find_similar_runs(run, by="structure", storage_dir=root),
        lambda: quark.find_similar_runs(run, by="code", storage_dir=root),
        lambda: quark.find_similar_runs(run, by="trace", storage_dir=root),
        lambda: quark.best_run("val/loss", storage_dir=root),
        lambda: quark.trace_statistics("p", metric="val/loss", storage_dir=root),
        lambda: quark.read_sources(run, root),
        lambda: quark.project("p", storage_dir=root).groups(),
        lambda: repr(quark.open_run(run, root).fields),
        lambda: quark.report([run, other], storage_dir=root),
    ):
        try:
            call()
        except quark.QuarkError:
            continue
        except Exception as error:
            wrong.append((repr(error), find_place(error)))
    return wrong


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in [*os.environ]:
        if name.startswith("QUARK_") and name not in SET_FOR_TESTS:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    return root, {"RUN": log_run(root, 0), "OTHER": log_run(root, 1)}


@pytest.mark.long
def test_hostile_fingerprints_aggregates_and_fields_are_shown_harmlessly(
    place, tmp_path, monkeypatch
):
    root, runs = place
    (tmp_path / "out").mkdir()
    wrong = walk(monkeypatch, root, tmp_path / "out", runs, COMMANDS) + ask(root, runs)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.long
def test_rows_that_no_writer_made_cost_no_traceback(place, tmp_path, monkeypatch):
    root, runs = place
    wrong = []
    for number, (column, value) in enumerate(damage(root, runs["OTHER"])):
        with contextlib.closing(sqlite3.connect(root / ".quark" / "quark.db")) as database:
            (before,) = database.execute(
                f"SELECT {column} FROM run WHERE id = ?", [runs["RUN"]]
            ).fetchone()
            database.execute(f"UPDATE run SET {column} = ? WHERE id = ?", [value, runs["RUN"]])
            database.commit()
        out = tmp_path / f"out{number}"
        out.mkdir()
        found = walk(monkeypatch, root, out, runs, SHORT) + ask(root, runs)
        wrong += [(column, value, *each) for each in found]
        with contextlib.closing(sqlite3.connect(root / ".quark" / "quark.db")) as database:
            database.execute(f"UPDATE run SET {column} = ? WHERE id = ?", [before, runs["RUN"]])
            database.commit()
    assert not wrong, "\n".join(map(str, wrong))
