"""`quark.search_runs` over what real sessions have logged."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_backends.csv.files import CsvReader
from quark_backends.store.databases.sqlite import connect, find_store
from quark_backends.store.reading.reader import StoreReader
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
    finder = StoreReader(lambda: connect(find_store(three_runs), read_only=True))
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


@pytest.fixture
def invoke(three_runs):
    def call(*arguments, columns=200):
        return CliRunner().invoke(
            cli,
            ["runs", "-d", str(three_runs), *arguments],
            env={"COLUMNS": str(columns)},
            catch_exceptions=False,
        )

    return call


def list_ids(result):
    assert result.exit_code == 0, result.output
    return [run["id"] for run in json.loads(result.stdout)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--where", "val/loss < 0.3"], ["first"]),
        (["-w", "config.lr == 1e-3"], ["third", "second"]),
        (["-w", "config.lr == 1e-3", "-s", "failed"], ["third"]),
        (["-w", "config.lr == 1e-3 or acc@1 > 0", "-t", "baseline"], ["first"]),
        (["-w", "config.lr > 0", "-p", "vision"], ["second", "first"]),
        (["--sort", "created"], ["first", "second", "third"]),
        (["--sort", "-val/loss", "-n", "1"], ["first"]),
        (["--sort", "-config.lr", "--sort", "created"], ["second", "third", "first"]),
        (["--sort", "min(val/loss) desc"], ["second", "first", "third"]),
    ],
)
def test_options_choose_and_sort(invoke, options, found):
    assert list_ids(invoke("--json", *options)) == found


@pytest.mark.long
def test_json_has_the_summary(invoke):
    (run,) = json.loads(invoke("--json", "-w", "id == 'second'").stdout)
    assert run["config"] == {"lr": 1e-3, "optimizer": {"name": "sgd"}}
    assert run["metrics"]["val/loss"]["non_finite"] == 1
    assert (run["newest_step"], run["last_loss"], run["state"]) == (2, None, "completed")


@pytest.mark.long
def test_what_is_asked_for_becomes_a_column(invoke):
    options = ["-w", "config.lr > 0 and acc@1 != 7", "--sort", "-min(val/loss)", "--sort", "step"]
    lines = invoke(*options).stdout.splitlines()
    header = next(line for line in lines if "status" in line)
    wanted = ("last loss", "config.lr", "acc@1", "min(val/loss)", "step", "tags")
    places = [header.index(name) for name in wanted]
    assert places == sorted(places)
    (row,) = [line for line in lines if line.strip().startswith("first")]
    assert row.split()[-6:] == ["0.25", "0.0003", "0.5", "0.25", "1", "baseline"]


@pytest.mark.long
def test_what_has_a_column_gets_no_second(invoke):
    plain = invoke().stdout.splitlines()[1]
    options = ["-w", "status != 'running' and tags == null", "--sort", "duration"]
    searched = invoke(*options).stdout.splitlines()[1]
    assert searched.split() == [word for word in plain.split() if word != "name"]


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_is_asked_for_has_room(invoke, columns):
    options = ["-w", "val/loss != 7 and config.optimizer.name == 'adamw'", "--sort", "-acc@1"]
    result = invoke(*options, columns=columns)
    assert max(map(len, result.stdout.splitlines())) <= columns
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("first")]
    for text in ("completed", "0.25", "adamw", "0.5"):
        assert text in row


@pytest.mark.long
def test_too_many_columns_are_folded(invoke):
    names = "config.lr config.optimizer.name val/loss acc@1 attempt updated ended".split()
    options = [option for name in names for option in ("--sort", name)]
    lines = invoke(*options, columns=60).stdout.splitlines()
    assert max(map(len, lines)) <= 60


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "message", "line"),
    [
        (["--where", "val/loss <"], "--where, column 11: expected", "  val/loss <"),
        (["--where", "val/los < 1"], "the nearest names are val/loss", "  val/los < 1"),
        (["--sort", "-tags"], "--sort, column 2: runs cannot be sorted", "  -tags"),
    ],
)
def test_a_malformed_expression_shows_the_place(invoke, options, message, line):
    result = invoke(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert any(message in text for text in lines)
    assert lines[-2] == line
    assert set(lines[-1].strip()) == {"^"}


@pytest.mark.long
def test_no_fitting_run_is_no_error(invoke):
    result = invoke("-w", "val/loss > 100")
    assert result.exit_code == 0
    assert result.stdout.startswith("No matching runs in the store ")
