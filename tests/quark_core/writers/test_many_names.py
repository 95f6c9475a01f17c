"""Very many metric names: told once, and every point is kept."""

import logging

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.upkeep import compaction
from quark_backends.store.upkeep.compaction import Compactor
from quark_core.writers import metrics as metrics_module
from quark_core.writers.metrics import read_run_series

NAMES = 300


@pytest.fixture
def few_are_many(monkeypatch):
    monkeypatch.setattr(metrics_module, "_MAX_CACHED_KEYS", 100)
    monkeypatch.setattr(compaction, "_MANY_KEYS", 50)


def log_names(tmp_path, count=NAMES):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        for _ in range(2):
            metrics = quark.MetricsLogger(session)
            for number in range(count):
                metrics.log(f"name/n{number:04}", float(number), step=number)
    return session


def show(tmp_path, session, *options):
    done = CliRunner().invoke(
        cli, ["show", session.run_id, "-d", str(tmp_path), *options], env={"COLUMNS": "120"}
    )
    assert done.exit_code == 0, done.output
    return done.output


def list_shown(output):
    return [line.split()[0] for line in output.splitlines() if line.split()[1:2] == ["2"]]


def test_it_is_told_once_and_the_run_completes(tmp_path, few_are_many, caplog):
    with caplog.at_level(logging.WARNING, "quark"):
        session = log_names(tmp_path)
    told = [record for record in caplog.records if "100 metric names" in record.message]
    assert len(told) == 1
    report = session.report_delivery()
    assert report.complete
    found = quark.open_run(session.run_id, tmp_path)
    assert found.status == "completed"
    points = quark.MetricsLogger(found).read()
    assert [record.value for record in points] == [float(n) for n in range(NAMES)] * 2
    assert read_run_series(found.open_run, "name/n0299", None).points == 2


def test_metrics_of_few_points_are_not_made_into_chunks(tmp_path, few_are_many):
    session = log_names(tmp_path)
    connection = connect(StoreLayout(tmp_path))
    compactor = Compactor(connection)
    (work,) = [item for item in compactor.find_work(minimum=1) if item.kind == "metric"]
    assert compactor.compact(work) == 0
    assert connection.execute("SELECT count(*) FROM chunk").fetchone() == (0,)
    connection.close()
    assert session.status == "completed"


@pytest.mark.long
def test_show_gives_them_page_by_page(tmp_path):
    session = log_names(tmp_path, 250)
    names = [f"name/n{number:04}" for number in range(250)]
    first = show(tmp_path, session)
    assert list_shown(first) == names[:100]
    assert "150 more metrics" in first
    assert f"--after {names[99]}" in first
    second = show(tmp_path, session, "--after", names[99], "--metrics", "120")
    assert list_shown(second) == names[100:220]
    assert f"--after {names[219]}" in second
    last = show(tmp_path, session, "--after", names[219])
    assert list_shown(last) == names[220:]
    assert "more metrics" not in last


@pytest.mark.long
def test_curves_of_very_many_metrics_are_not_read(tmp_path, monkeypatch):
    session = log_names(tmp_path, 60)
    monkeypatch.setattr("quark.cli.run_view._MANY_METRICS", 50)

    def refuse(*_, **__):
        raise AssertionError("a curve is read")

    monkeypatch.setattr("quark.cli.run_view.read_series", refuse)
    assert len(list_shown(show(tmp_path, session))) == 60
