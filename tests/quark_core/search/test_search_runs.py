"""`quark.search_runs` over what real sessions have logged."""

import pytest

import quark
from quark_backends.csv.files import CsvReader
from quark_backends.store.databases.sqlite import connect, find_store
from quark_backends.store.reading.search import RunFinder
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_search import build_search, summarize_run
from quark_core.search.fallback import search_by_reading, summarize_by_reading


def find(root, **arguments):
    return [run.run_id for run in quark.search_runs(storage_dir=root, **arguments)]


@pytest.mark.long
def test_runs_are_found_sorted_and_limited(three_runs):
    where = "val/loss < 0.3 and config.lr == 3e-4 and 'baseline' in tags"
    assert find(three_runs, where=where) == ["first"]
    assert find(three_runs) == ["third", "second", "first"]
    assert find(three_runs, project="vision", order_by="-min(val/loss)") == ["second", "first"]
    assert find(three_runs, order_by=["-config.lr", "created"], limit=2) == ["second", "third"]
    assert find(three_runs, where="acc@1 == 0.5") == ["first"]
    assert find(three_runs, limit=0) == []


@pytest.mark.long
def test_a_result_is_a_tuple_of_summaries(three_runs):
    found = quark.search_runs(storage_dir=three_runs, where="status == 'completed'")
    assert isinstance(found, tuple)
    assert all(isinstance(run, quark.RunSummary) for run in found)
    second = found[0]
    loss = second.metrics["val/loss"]
    assert isinstance(loss, quark.MetricSummary)
    assert (loss.count, loss.non_finite, loss.first, loss.last) == (3, 1, 0.8, None)
    assert (loss.low, loss.high, loss.last_step, second.newest_step) == (0.4, 0.8, 2, 2)
    assert second.config == {"lr": 1e-3, "optimizer": {"name": "sgd"}}


@pytest.mark.long
def test_the_working_directory_is_the_default(three_runs, monkeypatch):
    monkeypatch.chdir(three_runs)
    assert len(quark.search_runs()) == 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": -1}, "limit must not be negative"),
        ({"limit": True}, "limit must be an integer"),
        ({"limit": 1.5}, "limit must be"),
        ({"project": 3}, "project must be a str"),
        ({"where": 3}, "where must be a str"),
        ({"where": "val/loss <"}, "where, column 11"),
        ({"where": "val/los < 1"}, "val/loss"),
        ({"order_by": "lr"}, "config.lr"),
        ({"order_by": 3}, "order_by must be"),
        ({"order_by": ["val/loss", 3]}, "order_by must be"),
        ({"order_by": "tags"}, "order_by, column 1"),
        ({"order_by": ["created"] * 11}, "at most 10"),
    ],
)
def test_a_bad_argument_is_named(three_runs, arguments, message):
    with pytest.raises(quark.SchemaValidationError, match=message):
        quark.search_runs(storage_dir=three_runs, **arguments)


def test_where_there_is_no_store_it_says_so(tmp_path):
    with pytest.raises(quark.SessionStoreError, match="no Quark store"):
        quark.search_runs(storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_ingest_keeps_what_reading_every_point_would_give(three_runs):
    finder = RunFinder(lambda: connect(find_store(three_runs), read_only=True))
    reader = open_reader(three_runs)
    for run_id in ("first", "second", "third"):
        kept, read = finder.summarize(run_id), summarize_by_reading(reader, run_id)
        assert kept.metrics == read.metrics
        assert kept.newest_step == read.newest_step
        assert kept.stored.run == read.stored.run
        assert summarize_run(reader, run_id).metrics == read.metrics
    for arguments in (
        {"where": "min(val/loss) < 0.3 or config.optimizer.name == 'sgd'", "order_by": "-step"},
        {"where": "not val/loss > 0", "order_by": "name"},
        {"project": "vision", "limit": 1},
    ):
        search = build_search(**arguments)
        by_store = [run.run_id for run in finder.search(search)]
        assert by_store == [run.run_id for run in search_by_reading(reader, search)]
    finder.close()


@pytest.mark.long
def test_a_resumed_run_is_summed_up_without_what_it_hides(tmp_path, log_run):
    log_run(tmp_path, "run", values={"loss": [4.0, 3.0, 0.5]})
    session = quark.resume_run(run_id="run", storage_dir=tmp_path, from_step=2, reopen=True)
    with quark.MetricsLogger(session) as metrics:
        metrics.log("loss", 2.0, step=2)
    session.end_run()
    (found,) = quark.search_runs(storage_dir=tmp_path, where="min(loss) == 2 and attempt == 1")
    loss = found.metrics["loss"]
    assert (loss.count, loss.first, loss.last, loss.low) == (3, 4.0, 2.0, 2.0)


@pytest.mark.long
def test_a_backend_that_only_reads_is_searched_by_reading(tmp_path, log_run):
    for number, loss in enumerate((0.5, 0.25)):
        log_run(
            tmp_path,
            f"run{number}",
            tags=["big"] if number else [],
            config={"lr": 0.1 * number},
            values={"val/loss": [1.0, loss], "acc@1": [0.1]},
            backends=f"csv:{tmp_path / 'mirror'}",
        )
    reader = CsvReader(tmp_path / "mirror")

    def found(**arguments):
        return [run.run_id for run in search_by_reading(reader, build_search(**arguments))]

    assert found() == ["run1", "run0"]
    assert found(where="val/loss < 0.3 and 'big' in tags") == ["run1"]
    assert found(where="config.lr < 0.05", order_by="acc@1") == ["run0"]
    assert found(order_by="-min(val/loss)", limit=1) == ["run0"]
    (run,) = search_by_reading(reader, build_search(where="'big' in tags"))
    assert run.metrics["val/loss"].last == 0.25
    with pytest.raises(quark.SchemaValidationError, match="val/loss"):
        found(where="val/los < 1")
