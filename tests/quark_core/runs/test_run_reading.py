"""RunReader: a run is read with no session, no stream and no writer."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

import quark
from quark_backends.csv.backend import CsvBackend
from quark_core.backends.contract import BackendConfig, SupportsChanges
from quark_core.backends.curves import CurveQuery
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.query import Query
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.following import read_changes, read_heads, read_mark, read_series_many
from quark_core.runs.open_run import open_runs
from quark_core.runs.run_ids import find_labels, shorten_run_id
from quark_core.runs.run_reader import open_run_reader, read_run
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker


def start(root):
    return quark.start_run(project="p", config={"lr": 0.1}, storage_dir=root, capture=None)


def count_points(reader):
    return reader.read("metric", Query()).count


def test_a_stored_run_is_read_by_the_beginning_of_its_id_and_closed(tmp_path):
    with start(tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 0.5, step=1)
    reader = open_run_reader(session.run_id[:6], tmp_path)
    assert (reader.run_id, reader.held, reader.context.read_only) == (session.run_id, None, True)
    assert reader.stored.config.values == {"lr": 0.1}
    assert reader.stored.state == "completed"
    assert count_points(reader) == 1
    assert open_runs.find(session.run_id) is None
    reader.close()
    assert str(reader).startswith("RunReader(")


def test_a_run_of_this_process_is_flushed_before_it_is_read_and_stays_open(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step, target in enumerate((session, session.context, metrics, read_run(session))):
            metrics.log("loss", 0.5, step=step)
            reader = read_run(target)
            assert reader.held is session.open_run
            assert count_points(reader) == step + 1
            reader.close()
    assert session.status == "completed"


def test_only_what_has_a_run_is_read():
    with pytest.raises(quark.SchemaValidationError, match="not int"):
        read_run(7)


def test_analyses_and_comparisons_load_no_session(tmp_path):
    with start(tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 0.5, step=1)
    script = (
        "import sys\n"
        "from quark.analysis.comparison.engine import ComparisonEngine\n"
        "from quark.analysis.explanation.engine import explain_change\n"
        "from quark.analysis.outputs import open_analysis\n"
        "from quark_core.runs.run_reader import open_run_reader\n"
        "reader = open_run_reader(sys.argv[1], sys.argv[2])\n"
        "assert open_analysis(reader).load().metrics\n"
        "ComparisonEngine.compare_runs(reader, sys.argv[1])\n"
        "explain_change(reader, reader)\n"
        "assert 'quark_core.sessions.session' not in sys.modules\n"
    )
    arguments = [sys.executable, "-c", script, session.run_id, str(tmp_path)]
    subprocess.run(arguments, check=True)


@pytest.fixture
def backend(tmp_path):
    opened = CsvBackend(BackendConfig(storage_dir=tmp_path, run_id="run0", location="out"))
    assert not isinstance(opened, SupportsChanges)
    yield opened
    opened.close()


@pytest.fixture
def maker(backend):
    maker = BatchMaker("run0")
    backend.write(maker.start())
    return maker


def show(curve):
    return list(zip(curve.step.tolist(), curve.last.tolist(), strict=True))


def test_a_curve_and_what_came_since_meet(backend, maker):
    backend.write(maker.metrics(("a", 0, 0.0), ("b", 0, 9.0), ("a", 1, 1.0)))
    found = read_series_many(backend, "run0", CurveQuery.build(["a", "b", "none"], entries=None))
    assert [(curve.key, show(curve)) for curve in found.curves] == [
        ("a", [(0, 0.0), (1, 1.0)]),
        ("b", [(0, 9.0)]),
    ]
    nothing = read_changes(backend, "run0", found.cursor, keys=["a", "b", "none"])
    assert not nothing
    assert nothing.cursor == found.cursor
    other = BatchMaker("run0", rank=1, writer_id="rank1")
    backend.write(maker.metrics(("a", 2, 2.0), ("c", 2, 7.0)))
    backend.write(other.metrics(("a", 2, 5.0)))
    changes = read_changes(backend, "run0", nothing.cursor, keys=["a", "b", "none"])
    assert changes
    assert changes.records["metric"]["value"].tolist() == [2.0, 5.0]
    assert changes.records["metric"]["rank"].tolist() == [0, 1]
    assert not read_changes(backend, "run0", changes.cursor, keys=["a", "b", "none"])


def test_other_kinds_come_too(backend, maker):
    backend.write(maker.events("begun"))
    heads = read_heads(backend, "run0", kinds=["event", "metric"])
    backend.write(maker.events("saved"))
    backend.write(maker.metrics(("a", 0, math.nan)))
    changes = read_changes(backend, "run0", heads.cursor, kinds=["event", "metric"])
    assert changes.records["event"]["event_type"].tolist() == ["saved"]
    assert changes.records["metric"]["step"].tolist() == [0]


def test_what_another_attempt_hides_makes_the_rest_stale(backend, maker):
    backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
    found = read_series_many(backend, "run0", CurveQuery.build(["m"], entries=None))
    second = BatchMaker("run0", attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 999)
    backend.write(second.start(from_step=4))
    backend.write(second.metrics(("m", 4, 40.0)))
    assert read_changes(backend, "run0", found.cursor, keys=["m"]).stale
    again = read_series_many(backend, "run0", CurveQuery.build(["m"], entries=None))
    assert [(curve.attempt, show(curve)) for curve in again.curves] == [
        (0, [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]),
        (1, [(4, 40.0)]),
    ]
    every = read_series_many(
        backend, "run0", CurveQuery.build(["m"], entries=None, all_attempts=True)
    )
    assert [curve.points for curve in every.curves] == [6, 1]


def test_a_window_is_of_steps_epochs_or_times(backend, maker):
    values = [("m", step, float(step)) for step in range(10)]
    backend.write(maker.metrics(*values))
    (curve,) = read_series_many(
        backend, "run0", CurveQuery.build(["m"], entries=5, low=3, high=6)
    ).curves
    assert (curve.exact, curve.step.tolist()) == (True, [3, 4, 5, 6])
    (whole,) = read_series_many(backend, "run0", CurveQuery.build(["m"], entries=3)).curves
    assert (whole.exact, whole.points, whole.low.min(), whole.high.max()) == (False, 10, 0.0, 9.0)
    at_us = whole.time_us[0]
    began = FIRST_TIME_US
    for axis, low in (("time_us", at_us + 2), ("relative_us", at_us + 2 - began)):
        asked = {"axis": axis, "low": int(low), "high": int(low) + 4}
        (part,) = read_series_many(
            backend, "run0", CurveQuery.build(["m"], entries=10, **asked)
        ).curves
        assert part.step.tolist() == [2, 3, 4, 5, 6], axis
    assert not read_series_many(
        backend, "run0", CurveQuery.build(["m"], entries=3, low=50, high=60)
    ).curves


def test_only_reading_tells_whether_anything_changed(backend, maker):
    assert read_mark(backend, "run0") is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"axis": "loss"}, "relative_us"),
        ({"entries": 0}, "entries"),
        ({"keys": "m"}, "keys"),
        ({"low": 5, "high": 4}, "low"),
    ],
)
def test_a_bad_argument_is_named(backend, maker, wrong, named):
    arguments = {"keys": ["m"], "entries": 5, **wrong}
    with pytest.raises(SchemaValidationError, match=named):
        read_series_many(backend, "run0", CurveQuery.build(arguments.pop("keys"), **arguments))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"kinds": "metric"}, "kinds"), ({"kinds": ["no"]}, "kinds"), ({"max_rows": 0}, "rows")],
)
def test_a_bad_argument_of_changes_is_named(backend, maker, wrong, named):
    with pytest.raises(SchemaValidationError, match=named):
        read_changes(backend, "run0", {}, **wrong)


def test_an_unknown_run_is_not_found(backend, maker):
    with pytest.raises(RunNotFoundError):
        read_series_many(backend, "absent", CurveQuery.build(["m"], entries=5))
    with pytest.raises(RunNotFoundError):
        read_changes(backend, "absent", {})


# Ids by their beginning, over stores of every sort.


@pytest.fixture(params=["database", "journal"])
def root(request, tmp_path, monkeypatch):
    if request.param == "journal":
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    for run_id, name in (("alpha-1", "one"), ("alpha-2", None), ("beta-1", "two")):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        quark.start_run(project="p", name=name, storage_dir=tmp_path, backends="csv").end_run()
    monkeypatch.delenv("QUARK_RUN_ID")
    return tmp_path


def test_labels_are_those_of_runs_that_begin_so_newest_first(root):
    reader = open_reader(root)
    assert [label.run_id for label in find_labels(reader, "")] == ["beta-1", "alpha-2", "alpha-1"]
    assert find_labels(reader, "alpha-1") == [("alpha-1", "p", "one", "completed")]
    assert [label.run_id for label in find_labels(reader, "al", 1)] == ["alpha-2"]
    assert find_labels(reader, "alpha' or '1'='1") == []
    assert find_labels(reader, "ALPHA") == []


def test_the_beginning_of_an_id_is_enough(root):
    assert quark.open_run("beta", root).id == "beta-1"
    with pytest.raises(quark.RunNotFoundError, match="'alpha' matches 2 runs: alpha-2, alpha-1 "):
        quark.open_run("alpha", root)
    with quark.resume_run(run_id="beta", storage_dir=root, reopen=True) as session:
        assert session.id == "beta-1"


def test_a_mirror_finds_them_too(root):
    place = f"csv:{root / '.quark' / 'runs'}"
    assert quark.open_run(place, "beta").id == "beta-1"
    with pytest.raises(quark.RunNotFoundError, match="matches 2 runs"):
        quark.open_run(place, "alpha")


def test_ids_of_ours_are_shortened_and_those_of_others_are_not():
    assert shorten_run_id("3f2a91c0deadbeef") == "3f2a91c0"
    assert shorten_run_id("sweep-learning-rate-1") == "sweep-learning-rate-1"
    assert shorten_run_id("abc") == "abc"
