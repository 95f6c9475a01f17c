"""The CSV mirror's files: what they hold, what a crash leaves, what an outage does."""

import csv
import io
import json
import math
import os
import shutil
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_backends.csv import backend as backend_module
from quark_backends.csv import wide_table
from quark_backends.csv.backend import EVENT_HEADER, METRIC_HEADER, CsvBackend
from quark_backends.csv.files import encode_rows
from quark_core.backends.contract import BackendConfig
from quark_core.errors import BackendUnavailable, RunNotFoundError
from quark_core.records.query import Query
from quark_core.testing.fakes import BatchMaker

ALL = Query()
ODD = st.sampled_from("ab,\"\n\r' é\ud800")


@pytest.fixture
def config(tmp_path):
    return BackendConfig(storage_dir=tmp_path, run_id="run0", location="out")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "run0"


@pytest.fixture
def maker():
    return BatchMaker("run0")


@pytest.fixture
def backend(config, maker):
    opened = CsvBackend(config)
    opened.write(maker.start(tags=["t"]))
    return opened


def read_table(path):
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return header, [dict(zip(header, row, strict=True)) for row in rows]


def read_values(config):
    reader = CsvBackend(BackendConfig(storage_dir=config.storage_dir, location=config.location))
    return reader.read("run0", "metric", ALL)["value"].tolist()


def test_a_long_table_has_one_row_a_value(backend, maker, folder):
    odd = 'a "b",\nc'
    backend.write(maker.metrics(("m", 3, 0.1), epoch=1, description=odd, metadata={"é": [1, odd]}))
    backend.write(maker.metrics(("m", None, math.nan), ("x/y", None, -math.inf)))
    header, rows = read_table(folder / "metrics_long.csv")
    assert tuple(header) == METRIC_HEADER
    assert [row["value"] for row in rows] == ["0.1", "nan", "-inf"]
    assert [(row["step"], row["epoch"]) for row in rows] == [("3", "1"), ("", "0"), ("", "0")]
    assert [row["sequence"] for row in rows] == ["0", "1", "2"]
    assert {(row["attempt"], row["rank"], row["writer"]) for row in rows} == {("0", "0", "writer0")}
    assert rows[0]["timestamp"].startswith("2026-01-01T00:00:00.")
    assert rows[0]["description"] == odd
    assert json.loads(rows[0]["metadata"]) == {"é": [1, odd]}
    assert rows[1]["metadata"] == rows[1]["description"] == ""


def test_events_have_a_table_of_their_own(backend, maker, folder):
    backend.write(maker.events("saved", severity="warning", step=4, payload={"path": "a,b"}))
    header, (row,) = read_table(folder / "events.csv")
    assert tuple(header) == EVENT_HEADER
    assert (row["event_type"], row["severity"], row["step"]) == ("saved", "warning", "4")
    assert json.loads(row["payload"]) == {"path": "a,b"}


def test_config_and_run_are_json(backend, maker, folder):
    assert json.loads((folder / "config.json").read_text())["values"] == {"lr": 0.1}
    backend.write(maker.lifecycle(("tag", {"tag": "later"}), ("status", {"status": "failed"})))
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["tags"], run["attempt"]) == ("failed", ["later", "t"], 0)


def test_the_wide_table_has_one_row_a_step_and_the_newest_value(backend, maker, folder):
    backend.write(maker.metrics(("b", 10, 1.0), ("a", 2, 2.0), ("a", 10, 3.0), epoch=1))
    backend.write(maker.metrics(("a", 2, 4.0), ("c", None, 5.0)))
    assert not (folder / "metrics.csv").exists()
    backend.close()
    header, rows = read_table(folder / "metrics.csv")
    assert header == ["step", "epoch", "a", "b", "c"]
    assert [list(row.values()) for row in rows] == [
        ["2", "1", "4.0", "", ""],
        ["10", "1", "3.0", "1.0", ""],
        ["", "0", "", "", "5.0"],
    ]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "lifecycle.csv", "metrics.csv", "metrics_long.csv", "run.json"),
        "state.json",
    }


def test_a_wide_table_is_replaced_at_the_next_close(config, backend, maker, folder):
    backend.write(maker.metrics(("a", 0, 1.0)))
    backend.close()
    again = CsvBackend(config)
    again.write(maker.metrics(("b", 0, 2.0)))
    again.close()
    assert read_table(folder / "metrics.csv")[1] == [
        {"step": "0", "epoch": "", "a": "1.0", "b": "2.0"}
    ]


@pytest.mark.parametrize("torn", [b"1,,m,9", b"1,,m,9.0,t,0,0,1,,,writer0\n" * 3, b'"', b"\0\0"])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_torn_write_is_cut_off_at_the_next_batch(config, backend, maker, folder, torn, reopened):
    backend.write(maker.metrics(("m", 0, 1.0)))
    acknowledged = (folder / "metrics_long.csv").read_bytes()
    with (folder / "metrics_long.csv").open("ab") as file:
        file.write(torn)
    again = CsvBackend(config) if reopened else backend
    again.write(maker.metrics(("m", 1, 2.0)))
    assert (folder / "metrics_long.csv").read_bytes().startswith(acknowledged)
    assert [row["value"] for row in read_table(folder / "metrics_long.csv")[1]] == ["1.0", "2.0"]
    assert read_values(config) == [1.0, 2.0]


def test_an_unfinished_last_line_is_not_read(config, backend, maker, folder):
    backend.write(maker.metrics(("m", 0, 1.0)))
    acknowledged = (folder / "metrics_long.csv").read_bytes()
    line = b"1,,m,2.0,2026-01-01T00:00:00.000003Z,0,0,1,,,writer0"
    for length in range(len(line) + 1):
        (folder / "metrics_long.csv").write_bytes(acknowledged + line[:length])
        assert read_values(config) == [1.0], line[:length]


def test_a_state_that_is_behind_leads_to_no_duplicates(config, backend, maker, folder):
    backend.write(maker.metrics(("m", 0, 1.0)))
    behind = (folder / "state.json").read_bytes()
    second, third = maker.metrics(("m", 1, 2.0)), maker.metrics(("m", 2, 3.0))
    backend.write(second)
    (folder / "state.json").write_bytes(behind)
    again = CsvBackend(config)
    again.write(second)
    again.write(third)
    assert read_values(config) == [1.0, 2.0, 3.0]


def test_without_a_state_the_tables_begin_anew(config, backend, maker, folder):
    first, second = maker.metrics(("m", 0, 1.0)), maker.metrics(("m", 1, 2.0))
    backend.write(first)
    (folder / "state.json").unlink()
    again = CsvBackend(config)
    again.write(first)
    again.write(second)
    header, rows = read_table(folder / "metrics_long.csv")
    assert tuple(header) == METRIC_HEADER
    assert [row["value"] for row in rows] == ["1.0", "2.0"]


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("left", [0, 200])
def test_a_table_that_was_cut_by_hand_stays_readable(
    config, backend, maker, folder, reopened, left
):
    for step in range(10):
        backend.write(maker.metrics(("m", step, 1.0)))
    path = folder / "metrics_long.csv"
    path.write_bytes(path.read_bytes()[:left])
    again = CsvBackend(config) if reopened else backend
    again.write(maker.metrics(("m", 10, 2.0)))
    assert b"\0" not in path.read_bytes()
    assert tuple(read_table(path)[0]) == METRIC_HEADER
    assert read_values(config)[-1] == 2.0


def block_table(folder):
    (folder / "metrics_long.csv").mkdir()
    return lambda: (folder / "metrics_long.csv").rmdir()


def block_folder(folder):
    aside = folder.rename(folder.with_name("aside"))
    folder.write_text("in the way")

    def unblock():
        folder.unlink()
        aside.rename(folder)

    return unblock


def block_state(folder):
    aside = (folder / "state.json").rename(folder / "aside.json")
    (folder / "state.json").mkdir()

    def unblock():
        (folder / "state.json").rmdir()
        aside.rename(folder / "state.json")

    return unblock


@pytest.mark.parametrize("block", [block_table, block_folder, block_state])
def test_what_cannot_be_written_now_is_written_later(config, backend, maker, folder, block):
    batches = [maker.metrics(("m", step, float(step))) for step in range(3)]
    unblock = block(folder)
    for _ in range(2):
        with pytest.raises(BackendUnavailable):
            backend.write(batches[0])
    unblock()
    for batch in batches:
        backend.write(batch)
    assert read_values(config) == [0.0, 1.0, 2.0]
    assert len(read_table(folder / "metrics_long.csv")[1]) == 3


def test_a_mirror_that_cannot_be_opened_is_unavailable(config, tmp_path):
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(BackendUnavailable):
        CsvBackend(config)
    (tmp_path / "out").unlink()
    CsvBackend(config).close()


def test_a_folder_that_was_removed_is_made_again(config, backend, maker, folder):
    backend.write(maker.metrics(("m", 0, 1.0)))
    shutil.rmtree(folder)
    batch = maker.metrics(("m", 1, 2.0))
    try:
        backend.write(batch)
    except BackendUnavailable:
        folder.mkdir()
        backend.write(batch)
    assert tuple(read_table(folder / "metrics_long.csv")[0]) == METRIC_HEADER
    assert read_values(config) == [2.0]


def test_a_reader_writes_nothing(tmp_path, config):
    reader = CsvBackend(BackendConfig(storage_dir=tmp_path, read_only=True, run_id="run0"))
    with pytest.raises(BackendUnavailable):
        reader.write(BatchMaker("run0").metrics(("m", 0, 1.0)))
    with pytest.raises(RunNotFoundError):
        reader.load_run("run0")
    assert reader.list_runs() == []
    reader.close()
    assert list(tmp_path.iterdir()) == []


@given(
    st.lists(
        st.lists(st.text(ODD, max_size=4), min_size=1, max_size=3),
        max_size=4,
    )
)
def test_rows_without_quotes_are_what_the_csv_module_writes(rows):
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    expected = buffer.getvalue()
    if "\r" not in expected:
        assert encode_rows(rows) == expected.encode("utf-8", "replace")
    assert list(csv.reader(io.StringIO(encode_rows(rows).decode(), newline="\n"))) == [
        [cell.replace("\ud800", "?") for cell in row] for row in rows
    ]


def test_while_training_goes_on_another_process_derives_a_long_table(
    config, maker, folder, monkeypatch
):
    backend = CsvBackend(config)
    backend.write(maker.metrics(("a", 0, 1.0)))
    monkeypatch.setattr(backend_module, "_ASIDE_BYTES", 0)
    monkeypatch.setattr(backend, "_derive", None)
    backend._wide_due = 0.0
    backend.write(maker.metrics(("b", 0, 2.0)))
    expected = [{"step": "0", "epoch": "", "a": "1.0", "b": "2.0"}]
    assert read_table(folder / "metrics.csv")[1] == expected
    monkeypatch.undo()
    # Where there is no other process, this one does it.
    monkeypatch.setattr(backend_module, "_ASIDE_BYTES", 0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    backend._wide_due = 0.0
    backend.write(maker.metrics(("c", 0, 3.0)))
    assert read_table(folder / "metrics.csv")[1] == [{**expected[0], "c": "3.0"}]
    backend.close()


def test_a_process_whose_parent_is_gone_derives_nothing(config, maker, folder):
    backend = CsvBackend(config)
    backend.write(maker.metrics(("a", 0, 1.0)))
    assert wide_table.main([str(os.getpid()), str(folder)]) == 1
    assert not (folder / "metrics.csv").exists()
    assert wide_table.main([str(os.getppid()), str(folder)]) == 0
    assert read_table(folder / "metrics.csv")[1] == [{"step": "0", "epoch": "", "a": "1.0"}]
    backend.close()
