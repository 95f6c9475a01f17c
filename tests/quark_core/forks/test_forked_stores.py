"""Forks in every store: a server's over SQLite and PostgreSQL, journals alone, what only reads."""

import pytest
from service_fixtures import serving

import quark
from quark_core.backends.curves import CurveQuery
from quark_core.backends.forks import find_beginnings
from quark_core.backends.stored_batches import describe_run, select_rows
from quark_core.errors import RunNotFoundError
from quark_core.records import MetricRecord
from quark_core.records.query import Query
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.following import (
    read_changes,
    read_heads,
    read_mark,
    read_series,
    read_series_many,
)
from quark_core.runs.reading import iterate, read_rows
from quark_core.runs.run_search import build_search, find_runs, summarize_run
from quark_core.testing.fakes import BatchMaker

STORES = [
    "embedded",
    "journals",
    "service",
    pytest.param("postgres", marks=pytest.mark.long),
]
EXPECTED = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


@pytest.fixture(params=STORES)
def root(request, tmp_path, monkeypatch):
    """A storage root whose runs go to one of the stores."""
    folder = tmp_path / "runs"
    if request.param in ("embedded", "journals"):
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", str(int(request.param == "journals")))
        yield folder
        return
    url = None
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_service_url")
    with serving(tmp_path / "server", store_url=url) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key())
        yield folder


def log(root, points, **arguments):
    with quark.start_run(project="p", storage_dir=root, **arguments) as session:
        metrics = quark.MetricsLogger(session)
        for step, value in points:
            metrics.log("loss", value, step=step)
    return session.run_id


def show(rows):
    return list(zip(rows["step"].tolist(), rows["value"].tolist(), strict=True))


def test_a_fork_reads_the_same_from_every_store(root):
    parent = log(root, [(step, float(step)) for step in range(6)], config={"lr": 0.5})
    child = log(root, [(3, 30.0), (4, 40.0)], fork_from=(parent, 2))
    other = log(root, [(0, 9.0)])
    reader = open_reader(root)
    try:
        assert reader.load_run(child).run.fork_step == 2
        assert reader.load_run(child).config.values == {"lr": 0.5}
        assert show(read_rows(reader, child, "metric", Query())) == EXPECTED
        parts = iterate(reader, child, "metric", Query(), 2)
        assert [row for part in parts for row in show(part)] == EXPECTED
        assert read_series(reader, child, "loss", 3).points == 5
        assert read_series(reader, child, "loss").last.tolist() == [v for _, v in EXPECTED]
        curves = read_series_many(reader, child, CurveQuery.build(["loss"], entries=None))
        assert [(c.attempt, c.points) for c in curves.curves] == [(-1, 3), (0, 2)]
        assert not read_changes(reader, child, curves.cursor)
        assert show(read_changes(reader, child, {}).records["metric"]) == EXPECTED
        assert read_changes(reader, child, read_heads(reader, child).cursor).records == {}
        assert read_mark(reader, child) == read_mark(reader, child)
        loss = summarize_run(reader, child).metrics["loss"]
        assert (loss.count, loss.first, loss.last, loss.low) == (5, 0.0, 40.0, 0.0)
        where = build_search(where="min(loss) < 1 and max(loss) > 9", order_by="loss")
        assert [run.run_id for run in find_runs(reader, where)] == [child]
        assert summarize_run(reader, other).metrics["loss"].count == 1
    finally:
        reader.close()


class Kept:
    """A reader of somebody else's: it has batches as they came and knows nothing of forks."""

    def __init__(self, *batches):
        self.batches = batches

    def _load(self, run_id):
        found = [batch for batch in self.batches if batch.run_id == run_id]
        if not found:
            raise RunNotFoundError(f"run_id {run_id}: no such run")
        return found

    def read(self, run_id, kind, query):
        return select_rows(self._load(run_id), kind, query)

    def load_run(self, run_id):
        return describe_run(self._load(run_id))

    def list_runs(self, *, project=None, limit=None):
        return [self.load_run(run_id) for run_id in sorted({b.run_id for b in self.batches})]


def make_run(run_id, *points, fork=None, **arguments):
    maker = BatchMaker(run_id, writer_id=f"w{run_id}", **arguments)
    start = maker.start()
    (record,) = start.to_records()[:1]
    data = dict(record.data)
    if fork is not None:
        data["fork"] = {"run_id": fork[0], "step": fork[1]}
        data["run"] = {**data["run"], "parent_run_id": fork[0]}
    maker = BatchMaker(run_id, writer_id=f"w{run_id}", **arguments)
    metrics = [maker.metrics(*[("loss", s, v) for s, v in points])] if points else []
    return [maker.lifecycle(("start", data)), *metrics]


def test_a_third_partys_reader_is_read_with_the_beginning():
    points = [(step, float(step)) for step in range(6)]
    reader = Kept(
        *make_run("parent", *points), *make_run("child", (3, 30.0), (4, 40.0), fork=("parent", 2))
    )
    assert show(read_rows(reader, "child", "metric", Query())) == EXPECTED
    assert show(read_rows(reader, "child", "metric", Query(limit=3))) == EXPECTED[-3:]
    assert read_series(reader, "child", "loss", 2).points == 5
    curves = read_series_many(reader, "child", CurveQuery.build(["loss"], entries=None))
    assert [(c.attempt, c.points) for c in curves.curves] == [(-1, 3), (0, 2)]
    assert not read_changes(reader, "child", curves.cursor, keys=["loss"])
    (found,) = find_runs(reader, build_search(where="min(loss) < 1 and max(loss) > 9"))
    assert found.run_id == "child"
    assert summarize_run(reader, "child").metrics["loss"].count == 5


@pytest.mark.parametrize(
    "runs",
    [
        [("a", ("a", 5))],
        [("a", ("b", 5)), ("b", ("a", 5))],
        [("a", ("b", 5)), ("b", ("c", 5)), ("c", ("b", 5))],
        [("a", ("gone", 5))],
        [("a", ("../../x", 5))],
        [("a", ("b", "five"))],
        [("a", ("b", -3))],
    ],
)
def test_a_folder_that_says_nonsense_of_forks_is_read_all_the_same(runs):
    reader = Kept(*(b for run_id, fork in runs for b in make_run(run_id, (1, 1.0), fork=fork)))
    assert (1, 1.0) in show(read_rows(reader, "a", "metric", Query()))
    assert len(find_beginnings(reader, "a")) == len(runs) - 1
    assert read_series(reader, "a", "loss", 10).points == len(runs)
    assert summarize_run(reader, "a").metrics["loss"].count == len(runs)


def test_a_run_that_is_no_fork_costs_one_look():
    reader = Kept(*make_run("plain", (0, 0.0)))
    looks = []
    plain = reader.load_run
    reader.load_run = lambda run_id: looks.append(run_id) or plain(run_id)
    for _ in range(5):
        read_rows(reader, "plain", MetricRecord.KIND, Query())
    assert looks == ["plain"]
