"""`quark export` writes all of a run, exactly, whole files or none."""

import contextlib
import csv
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from kit.programs import run_code
from set_for_tests import SET_FOR_TESTS

import quark
from quark.cli.export import FileSet
from quark_core.records import MetricRecord, parse_time
from quark_core.records.columns import Columns, table_fields
from quark_core.records.query import Query

SCRIPT = str(Path(sys.executable).with_name("quark"))
KINDS = ("metric", "event", "layer")

pytestmark = pytest.mark.filterwarnings("ignore:metric 'größe':RuntimeWarning")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory, and no settings of the user's."""
    for name in [*os.environ]:
        if (name.startswith("QUARK_") and name not in SET_FOR_TESTS) or name in (
            "FORCE_COLOR",
            "TTY_COMPATIBLE",
        ):
            monkeypatch.delenv(name)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch, all_records):
    """A store with one run, `abc`, that has odd records of every kind."""
    monkeypatch.setenv("QUARK_RUN_ID", "abc")
    root = tmp_path / "store"
    with quark.start_run(
        project="p", storage_dir=root, name="first", config={"größe": [1, 2.5]}, tags=["t"]
    ) as session:
        session.write(all_records)
    return root


def read_records(root, kind):
    run = quark.open_run("abc", root).open_run
    return run.read(kind, Query()).to_records()


def fields_of(record):
    return [(f, getattr(record, f.source)) for f in table_fields(record.KIND)]


SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def check_number(found, value):
    assert found == value or (math.isnan(found) and math.isnan(value))
    assert math.copysign(1, found) == math.copysign(1, value) or math.isnan(value)


def test_csv_holds_every_value(invoke, root, elsewhere):
    done = invoke("export", "abc", "-d", root, "--format", "csv")
    assert done.exit_code == 0
    for kind in KINDS:
        records = read_records(root, kind)
        with (elsewhere / "abc" / f"{kind}.csv").open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        assert header == [field.name for field, _ in fields_of(records[0])]
        assert len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
            for cell, (field, value) in zip(row, fields_of(record), strict=True):
                if value is None:
                    assert cell == ""
                elif field.encoding == "u":
                    assert cell == record.timestamp
                    assert parse_time(cell) == value
                elif field.encoding == "f":
                    check_number(SPELLED.get(cell) or float(cell), value)
                elif field.encoding in ("j", "l"):
                    expected = dict(value) if field.encoding == "j" else list(value)
                    assert json.loads(cell) == expected
                else:
                    assert cell == str(value)


def test_json_lines_are_the_records_as_dicts(invoke, root, elsewhere):
    assert invoke("export", "abc", "-d", root, "--format", "jsonl").exit_code == 0
    for kind in KINDS:
        records = read_records(root, kind)
        lines = (elsewhere / "abc" / f"{kind}.jsonl").read_bytes().splitlines()
        assert len(lines) == len(records)
        for line, record in zip(lines, records, strict=True):
            found, wanted = json.loads(line), record.to_dict()
            assert list(found) == list(wanted)
            for name, value in wanted.items():
                if isinstance(value, float):
                    check_number(SPELLED.get(str(found[name]), found[name]), value)
                else:
                    assert found[name] == value


@pytest.mark.long
def test_parquet_is_the_arrow_table(invoke, root, elsewhere):
    assert invoke("export", "abc", "-d", root, "--format", "parquet").exit_code == 0
    for kind in KINDS:
        records = read_records(root, kind)
        table = pq.read_table(elsewhere / "abc" / f"{kind}.parquet")
        wanted = Columns.from_records(kind, records).to_arrow()
        assert table.schema.equals(wanted.schema, check_metadata=True)
        # NaN is equal to nothing, so floats are compared as texts.
        assert str(table.to_pylist()) == str(wanted.to_pylist())
        assert pl.read_parquet(elsewhere / "abc" / f"{kind}.parquet").height == len(records)


def test_other_programs_read_the_csv(invoke, root, elsewhere):
    invoke("export", "abc", "-d", root, "--format", "csv", "--kind", "metric")
    values = [record.value for record in read_records(root, "metric")]
    path = elsewhere / "abc" / "metric.csv"
    by_pandas = pd.read_csv(path)["value"].tolist()
    by_polars = pl.read_csv(path, schema_overrides={"value": pl.Float64})["value"].to_list()
    for found in (by_pandas, by_polars):
        for one, value in zip(found, values, strict=True):
            check_number(one, value)


def test_the_run_is_there_too(invoke, root, elsewhere):
    done = invoke("export", "first", "-d", root, "--format", "jsonl")
    found = json.loads((elsewhere / "abc" / "run.json").read_text(encoding="utf-8"))
    assert found["schema_version"] == quark.CURRENT_SCHEMA_VERSION
    assert found["run"]["id"] == "abc"
    assert found["run"]["status"] == "completed"
    assert found["project"]["name"] == "p"
    assert found["config"]["values"] == {"größe": [1, 2.5]}
    assert "python" in found["environment"]["values"]
    counts = {f"{kind}.jsonl": len(read_records(root, kind)) for kind in KINDS}
    assert found["rows"] == counts
    (line,) = done.stdout.splitlines()
    size = sum(path.stat().st_size for path in (elsewhere / "abc").iterdir())
    assert line.startswith(f"{sum(counts.values())} rows, ")
    assert f"{size / 1000:.1f} kB in 4 files: " in line
    assert done.stderr == ""


def test_only_kinds_that_the_run_has_make_files(invoke, tmp_path, elsewhere, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "few")
    with quark.start_run(project="p", storage_dir=tmp_path / "store"):
        pass
    invoke("export", "few", "-d", tmp_path / "store", "--format", "csv", "-o", "out")
    assert sorted(os.listdir("out")) == ["event.csv", "run.json"]
    # What is asked for by name is there, be it empty.
    kinds = ("-k", "metric", "-k", "layer")
    for suffix in ("csv", "jsonl", "parquet"):
        invoke("export", "few", "-d", tmp_path / "store", "--format", suffix, *kinds, "-o", suffix)
        assert sorted(os.listdir(suffix)) == [f"layer.{suffix}", f"metric.{suffix}", "run.json"]
    assert Path("jsonl/layer.jsonl").read_bytes() == b""
    assert Path("csv/layer.csv").read_text().startswith("run_id,writer_id,")
    assert pq.read_table("parquet/metric.parquet").num_rows == 0


def test_one_kind_goes_to_one_file(invoke, root, elsewhere):
    done = invoke("export", "abc", "-d", root, "--format", "csv", "-k", "layer", "-o", "new/l.csv")
    assert done.exit_code == 0
    assert sorted(os.listdir("new")) == ["l.csv", "l.run.json"]


@pytest.mark.long
def test_a_directory_may_look_like_a_file(invoke, root, elsewhere):
    Path("odd.csv").mkdir()
    assert invoke("export", "abc", "-d", root, "--format", "csv", "-o", "odd.csv").exit_code == 0
    assert "metric.csv" in os.listdir("odd.csv")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["abc", "--format", "xml"], 2, "'xml' is not one of 'parquet', 'csv', 'jsonl'"),
        (["abc"], 2, "--format"),
        (["abc", "--format", "csv", "-k", "image"], 2, "'metric', 'event', 'telemetry', 'layer'"),
        (
            ["abc", "--format", "csv", "-k", "lifecycle"],
            2,
            "'metric', 'event', 'telemetry', 'layer'",
        ),
        (["abc", "--format", "csv", "-o", "x.csv"], 2, "exactly one --kind"),
        (
            ["abc", "--format", "csv", "-k", "metric", "-o", "x.jsonl"],
            2,
            "does not end in '.csv', as --format csv requires.",
        ),
        (["zzz", "--format", "csv"], 2, "no run matches 'zzz'"),
        (["abc", "--format", "csv", "-o", "a-file/out"], 1, "a-file/out cannot be written"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(root, elsewhere, arguments, status, message):
    Path("a-file").write_text("x")
    done = subprocess.run(
        [SCRIPT, "export", *arguments, "-d", str(root)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir() == ["a-file"]


def test_what_is_there_is_overwritten_only_by_force(invoke, root, elsewhere):
    Path("out").mkdir()
    for name in ("metric.csv", "run.json"):
        Path("out", name).write_text("mine")
        done = invoke("export", "abc", "-d", root, "--format", "csv", "-o", "out")
        assert done.exit_code == 1
        assert f"out/{name} already exists. To overwrite it, pass --force." in done.output
        assert os.listdir("out") == [name]
        assert Path("out", name).read_text() == "mine"
        if name == "metric.csv":
            Path("out", name).unlink()
    done = invoke("export", "abc", "-d", root, "--format", "csv", "-o", "out", "--force")
    assert done.exit_code == 0
    assert json.loads(Path("out/run.json").read_text())["run"]["id"] == "abc"


@pytest.mark.long
def test_parquet_without_pyarrow_says_what_to_install(root, elsewhere):
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'pyarrow':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from quark.cli.main import main\n"
        "main()\n"
    )
    for file_format, status in (("parquet", 1), ("csv", 0)):
        done = run_code(program, "export", "abc", "-d", root, "--format", file_format, ends=status)
        if status:
            assert done.stderr == (
                "quark: --format parquet needs pyarrow, which is not installed: "
                'pip install "quark-tracker[arrow]"\n'
            )
            assert os.listdir() == []


def make_parts(count):
    record = MetricRecord("r", "w", 0, 0, 0, 0, "m", None, "m", 1.0, 0)
    for _ in range(count):
        yield Columns.from_records("metric", [record] * 10)


@pytest.mark.parametrize("file_format", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_what_is_interrupted_leaves_no_file(elsewhere, file_format, error):
    def interrupted():
        yield from make_parts(3)
        raise error

    with pytest.raises(error), FileSet(Path("a/out"), force=False) as files:
        files.write("one", file_format, "metric", make_parts(2), optional=False)
        files.write("two", file_format, "metric", interrupted(), optional=False)
    assert not Path("a/out").exists()
    Path("kept").mkdir()
    Path("kept/mine").write_text("mine")
    with pytest.raises(error), FileSet(Path("kept"), force=True) as files:
        files.write("mine", file_format, "metric", interrupted(), optional=False)
    assert os.listdir("kept") == ["mine"]
    assert Path("kept/mine").read_text() == "mine"


def test_a_file_that_appears_meanwhile_is_not_overwritten(elsewhere):
    with (
        pytest.raises(click.ClickException, match="exists"),
        FileSet(Path("out"), force=False) as files,
    ):
        files.write("one", "csv", "metric", make_parts(2), optional=False)
        Path("out/one").write_text("mine")
    assert Path("out/one").read_text() == "mine"
    assert os.listdir("out") == ["one"]


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "long")
    with quark.start_run(project="p", storage_dir=tmp_path / "store") as session:
        session.write(
            MetricRecord("r", "w", 0, 0, 0, step, "m", None, "m", step / 7, step)
            for step in range(150_000)
        )
    return tmp_path / "store"


@pytest.mark.long
def test_ctrl_c_leaves_no_half_file(long_run, elsewhere):
    command = [SCRIPT, "export", "long", "-d", str(long_run), "--format", "jsonl", "-o", "out"]
    for _ in range(10):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            while process.poll() is None and not list(Path().glob("out/.metric*")):
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate()
        if process.returncode != 0:
            break
        # On a busy machine it was at its end before this process came to look.
        shutil.rmtree("out")
    assert (process.returncode, output) == (130, b"")
    assert errors.strip() == b"quark: interrupted; incomplete files were removed"
    assert os.listdir() == []


@pytest.mark.long
def test_many_rows_come_in_several_row_groups_and_all_are_there(invoke, long_run, elsewhere):
    done = invoke("export", "long", "-d", long_run, "--format", "parquet")
    assert done.stdout.startswith("150,002 rows, ")
    file = pq.ParquetFile("long/metric.parquet")
    assert file.metadata.num_row_groups > 1
    assert file.read(["step"])["step"].to_pylist() == list(range(150_000))


@pytest.mark.long
def test_small_parts_share_a_row_group(elsewhere):
    with FileSet(Path("out"), force=False) as files:
        files.write("one", "parquet", "metric", make_parts(7000), optional=False)
    metadata = pq.ParquetFile("out/one").metadata
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert groups == [65_540, 4_460]


def run_on_terminal(arguments):
    """What a command writes to stderr, where that is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        # The end of a terminal whose last holder has left is an error on Linux.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                shown += part
        output = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    return output.decode(), shown.decode()


@pytest.mark.long
def test_a_terminal_shows_a_bar_and_nothing_else_does(root, elsewhere):
    arguments = ["export", "abc", "-d", str(root), "--format", "csv"]
    output, shown = run_on_terminal([*arguments, "-o", "one"])
    assert "metric" in shown
    assert "6 rows" in shown
    assert len(output.splitlines()) == 1
    done = subprocess.run([SCRIPT, *arguments, "-o", "two"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_hidden_points_come_only_when_all_attempts_are_asked_for(invoke, tmp_path, elsewhere):
    root = tmp_path / "store"
    session = quark.start_run(project="p", storage_dir=root)
    quark.MetricsLogger(session).log_many({"m": 0.0}, step=0)
    quark.MetricsLogger(session).log_many({"m": 1.0}, step=1)
    session.end_run("interrupted")
    with quark.resume_run(run_id=session.run_id, storage_dir=root, from_step=1) as again:
        metrics = quark.MetricsLogger(again)
        metrics.log("m", 7.0, step=1)
        assert metrics.series("m").last.tolist() == [0.0, 7.0]
        assert quark.series(again, "m", all_attempts=True).last.tolist() == [0.0, 1.0, 7.0]
        for all_attempts, values in ((False, [0.0, 7.0]), (True, [0.0, 1.0, 7.0])):
            parts = metrics.iterate(all_attempts=all_attempts)
            assert [value for part in parts for value in part["value"].tolist()] == values
    for flags, steps in (([], [0, 1]), (["--all-attempts"], [0, 1, 1])):
        arguments = [
            "-d",
            root,
            "--format",
            "csv",
            "-k",
            "metric",
            "-o",
            "m.csv",
            "--force",
            *flags,
        ]
        assert invoke("export", session.run_id, *arguments).exit_code == 0
        assert pd.read_csv("m.csv")["step"].tolist() == steps
