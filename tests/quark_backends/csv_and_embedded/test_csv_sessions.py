"""The CSV mirror in sessions and between processes: at once, after a crash, one by one."""

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

import quark
from quark_backends.csv.backend import METRIC_HEADER, CsvBackend
from quark_core.backends.contract import BackendConfig
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

WRITER = """
import pathlib, sys
from quark_backends.csv.backend import CsvBackend
from quark_core.backends.contract import BackendConfig
from quark_core.testing.fakes import BatchMaker
config = BackendConfig(storage_dir=pathlib.Path(sys.argv[1]), run_id="run0", location="out")
maker = BatchMaker("run0", writer_id=sys.argv[2], started_us=int(sys.argv[3]))
backend = CsvBackend(config)
backend.write(maker.metrics(("m", 0, 2.0), ("other", 1, 3.0)))
print("written", flush=True)
sys.stdin.read()
backend.close()
"""
ATTACHED = """
import pickle, sys, quark
context = pickle.loads(bytes.fromhex(sys.argv[1]))
with quark.MetricsLogger(context) as metrics:
    metrics.log("child", 2.0, step=0)
"""
FULL_DISK = """
import os, pathlib, resource, sys
from quark_backends.csv.backend import CsvBackend
from quark_core.backends.contract import BackendConfig
from quark_core.errors import BackendUnavailable
from quark_core.testing.fakes import BatchMaker
config = BackendConfig(storage_dir=pathlib.Path(sys.argv[1]), run_id="run0", location="out")
maker = BatchMaker("run0")
backend = CsvBackend(config)
backend.write(maker.start())
backend.write(maker.metrics(("m", 0, 0.0)))
path = pathlib.Path(sys.argv[1], "out", "run0", "metrics_long.csv")
batch = maker.metrics(*[("m", step, 1.0) for step in range(1, 101)])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
for _ in range(2):
    try:
        backend.write(batch)
    except BackendUnavailable:
        print("unavailable", path.stat().st_size)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
backend.write(batch)
backend.close()
"""


@pytest.fixture
def config(tmp_path):
    return BackendConfig(storage_dir=tmp_path, run_id="run0", location="out")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "run0"


@pytest.fixture
def start_writer(tmp_path):
    """Starts a process that holds the mirror open after a batch of its own."""
    started = []

    def start(writer_id="writer1", started_us=FIRST_TIME_US + 1000):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), writer_id, str(started_us)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        assert child.stdout.readline() == "written\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_metrics(config):
    return CsvBackend(
        BackendConfig(storage_dir=config.storage_dir, location=config.location, read_only=True)
    ).read("run0", "metric", Query())


def test_two_live_processes_keep_separate_files_that_are_read_as_one(config, folder, start_writer):
    backend, maker = CsvBackend(config), BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 1.0)))
    child = start_writer()
    backend.write(maker.metrics(("m", 1, 4.0)))
    tables = sorted(path.name for path in folder.glob("metrics_long*.csv"))
    assert len(tables) == 2
    assert tables[1] == "metrics_long.csv"
    assert tables[0].startswith(f"metrics_long-{child.pid}-")
    assert [row["value"] for row in read_rows(folder / tables[0])] == ["2.0", "3.0"]
    assert [row["value"] for row in read_rows(folder / tables[1])] == ["1.0", "4.0"]
    columns = read_metrics(config)
    assert columns["value"].tolist() == [1.0, 4.0, 2.0, 3.0]
    assert columns["writer_id"].tolist() == ["writer0"] * 2 + ["writer1"] * 2


def test_the_wide_table_has_the_newest_value_of_all_processes(config, folder, start_writer):
    backend, maker = CsvBackend(config), BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 1.0)))
    assert start_writer().communicate("") == ("", None)
    backend.close()
    assert read_rows(folder / "metrics.csv") == [
        {"step": "0", "epoch": "", "m": "2.0", "other": ""},
        {"step": "1", "epoch": "", "m": "", "other": "3.0"},
    ]


def test_the_files_of_a_killed_process_are_taken_over(config, folder, start_writer):
    child = start_writer("writer0", FIRST_TIME_US)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with (folder / "metrics_long.csv").open("ab") as file:
        file.write(b"1,,other,4.0,2026")
    backend, maker = CsvBackend(config), BatchMaker("run0")
    again = maker.metrics(("m", 0, 2.0), ("other", 1, 3.0))
    backend.write(again)
    backend.write(maker.metrics(("m", 2, 5.0)))
    assert [path.name for path in folder.glob("metrics_long*")] == ["metrics_long.csv"]
    assert [row["value"] for row in read_rows(folder / "metrics_long.csv")] == ["2.0", "3.0", "5.0"]


def test_the_files_of_a_process_that_has_left_are_taken_over(config, folder, start_writer):
    start_writer().communicate("")
    backend = CsvBackend(config)
    backend.write(BatchMaker("run0").metrics(("m", 1, 5.0)))
    assert [path.name for path in folder.glob("metrics_long*")] == ["metrics_long.csv"]
    assert read_metrics(config)["value"].tolist() == [5.0, 2.0, 3.0]


@pytest.mark.long
def test_a_full_disk_is_an_outage_and_everything_comes_later(tmp_path, config, folder):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    # The second attempt has torn the same file, and no longer one.
    assert done.stdout.splitlines() == ["unavailable 2000"] * 2
    rows = read_rows(folder / "metrics_long.csv")
    assert [int(row["step"]) for row in rows] == list(range(101))
    assert len(read_rows(folder / "metrics.csv")) == 101
    assert list(folder.glob("*.part*")) == []


@pytest.mark.long
def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path, backends="csv", config={"lr": 1})
    quark.MetricsLogger(session).log_many({"a": 1.0, "b": 2.0}, step=0)
    session.end_run("interrupted")
    folder = session.run_path / "csv"
    before = (folder / "metrics_long.csv").read_bytes()
    resumed = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, backends="csv")
    quark.MetricsLogger(resumed).log("a", 3.0, step=1)
    resumed.end_run()
    assert (folder / "metrics_long.csv").read_bytes().startswith(before)
    rows = read_rows(folder / "metrics_long.csv")
    assert [(row["value"], row["attempt"]) for row in rows] == [
        *(("1.0", "0"), ("2.0", "0"), ("3.0", "1"))
    ]
    assert len({row["writer"] for row in rows}) == 2
    assert tuple(rows[0]) == METRIC_HEADER
    events = [row["event_type"] for row in read_rows(folder / "events.csv")]
    assert events == ["run_started", "run_ended", "run_resumed", "run_ended"]
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["attempt"]) == ("completed", 1)
    assert json.loads((folder / "config.json").read_text())["values"] == {"lr": 1}
    assert [row["a"] for row in read_rows(folder / "metrics.csv")] == ["1.0", "3.0"]


@pytest.mark.long
def test_a_process_that_joins_a_session_is_mirrored_beside_it(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("parent", 1.0, step=0)
        metrics.flush()
        deadline = time.monotonic() + 30
        while not session.report_delivery().complete:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        context = pickle.dumps(session.context).hex()
        done = subprocess.run(
            [sys.executable, "-c", ATTACHED, context], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        metrics.log("parent", 3.0, step=1)
    reader = CsvBackend(BackendConfig(storage_dir=tmp_path, read_only=True))
    found = reader.read(session.run_id, "metric", Query()).to_records()
    assert [(r.metric_key, r.value) for r in found] == [
        *(("parent", 1.0), ("parent", 3.0), ("child", 2.0))
    ]
    assert found == metrics.read()
    assert reader.load_run(session.run_id).state == "completed"
    assert len(list((session.run_path / "csv").glob("metrics_long-*.csv"))) == 1


@pytest.mark.parametrize(
    ("backends", "place"),
    [("csv", ".quark/runs/{}/csv"), ("csv:out", "out/{}"), ("csv:./a/b", "a/b/{}")],
)
def test_a_session_is_mirrored_to_its_place(tmp_path, backends, place):
    with quark.start_run(
        project="p", storage_dir=tmp_path, backends=backends, config={"lr": 0.5}, name="n"
    ) as session:
        quark.MetricsLogger(session).log("m", 1.5, step=0)
    folder = tmp_path / place.format(session.run_id)
    assert read_rows(folder / "metrics.csv") == [{"step": "0", "epoch": "", "m": "1.5"}]
    assert json.loads((folder / "config.json").read_text())["values"] == {"lr": 0.5}
    location = backends.partition(":")[2]
    reader = CsvBackend(BackendConfig(storage_dir=tmp_path, location=location, read_only=True))
    (stored,) = reader.list_runs()
    assert (stored.run.id, stored.state, stored.run.name) == (session.run_id, "completed", "n")
    metrics = reader.read(session.run_id, "metric", Query()).to_records()
    assert metrics == quark.MetricsLogger(session).read()
    events = reader.read(session.run_id, "event", Query()).to_records()
    assert events == quark.EventLogger(session).read()


def test_an_unknown_option_is_refused_by_name(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:?foo=1") as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    (lane,) = [one for one in session.report_delivery().lanes if not one.primary]
    assert list(lane.errors) == ["the CSV mirror has no option 'foo', only 'publish'"]
    with pytest.raises(quark.SessionStoreError, match="no option 'foo'"):
        quark.open_run(session.run_id, tmp_path, backend="csv:?foo=1")
