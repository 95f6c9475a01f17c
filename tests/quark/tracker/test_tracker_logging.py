"""What a tracker's calls put into its run."""

import csv
import json
import math
import threading
import warnings

import numpy as np
import pytest

import quark
from quark_core.errors import TrainingHalted
from quark_core.records import AlertRecord


@pytest.fixture
def tracker():
    made = quark.setup_tracker("p", backends="quark")
    yield made
    made.finish()


def read_events(tracker):
    session = quark.open_run(tracker.run_id, ".")
    return [
        (r.step, r.payload["values"])
        for r in quark.EventLogger(session).read(event_type="tracker_values")
    ]


def test_rows_without_a_step_are_numbered(tracker, read):
    tracker.log({"loss": 0.5})
    tracker.log({"loss": 0.25, "lr": 1e-3})
    tracker.finish()
    assert read(tracker) == [("loss", 0, 0.5), ("loss", 1, 0.25), ("lr", 1, 1e-3)]


def test_a_row_without_a_step_comes_after_the_row_before(tracker, read):
    tracker.log({"a": 1.0}, step=10)
    tracker.log({"a": 2.0})
    tracker.log({"a": 3.0}, step=5)
    tracker.log({"a": 4.0})
    tracker.finish()
    assert read(tracker) == [("a", 10, 1.0), ("a", 11, 2.0), ("a", 5, 3.0), ("a", 6, 4.0)]


def test_a_step_among_the_values_is_the_row_s_step(tracker, read):
    tracker.log({"step": 7, "a": 1.0})
    tracker.log({"step": 8, "a": 2.0}, step=3)
    tracker.log({"step": "x", "a": 3.0})
    tracker.finish()
    assert [row for row in read(tracker) if row[0] == "a"] == [
        *(("a", 7, 1.0), ("a", 3, 2.0), ("a", 4, 3.0))
    ]


def test_a_row_that_is_not_committed_goes_into_the_next_one(tracker, read):
    tracker.log({"a": 1.0}, commit=False)
    tracker.log({"b": 2.0}, commit=False)
    tracker.log({"c": 3.0})
    tracker.log({"d": 4.0})
    tracker.finish()
    assert read(tracker) == [("a", 0, 1.0), ("b", 0, 2.0), ("c", 0, 3.0), ("d", 1, 4.0)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("a", 1.0), ("a", 2.0)], [("a", 0, 1.0), ("a", 1, 2.0)]),
        ([("a", 1.0), ("b", 2.0)], [("a", 0, 1.0), ("b", 1, 2.0)]),
        ([("a", 1.0), ("a", 1.0), ("a", 1.0)], [("a", 0, 1.0), ("a", 1, 1.0), ("a", 2, 1.0)]),
    ],
    ids=["same name", "other name", "same value"],
)
def test_rows_that_nobody_commits_are_rows_of_their_own(tracker, read, rows, expected):
    for name, value in rows:
        tracker.log({name: value}, commit=False)
    tracker.finish()
    assert read(tracker) == expected


def test_a_row_with_a_name_that_waits_already_loses_nothing(tracker, read):
    tracker.log({"a": 1.0}, commit=False)
    tracker.log({"a": 2.0, "b": 2.0}, commit=False)
    tracker.log({"c": 3.0})
    tracker.log({"a": 4.0}, step=9, commit=False)
    tracker.log({"a": 5.0}, step=9)
    tracker.finish()
    assert read(tracker) == [
        *(("a", 0, 1.0), ("a", 1, 2.0), ("b", 1, 2.0), ("c", 1, 3.0)),
        *(("a", 9, 4.0), ("a", 9, 5.0)),
    ]


def test_what_waits_costs_no_more_than_the_names_that_there_are(tracker):
    for value in range(1000):
        tracker.log({"a": value, "b": value}, commit=False)
    assert len(tracker._run._waiting) == 1


def test_a_row_of_another_step_writes_the_one_that_waits(tracker, read):
    tracker.log({"a": 1.0}, step=3, commit=False)
    tracker.log({"b": 2.0}, commit=False)
    tracker.log({"c": 3.0}, step=4, commit=False)
    tracker.log({"d": 4.0}, step=4)
    tracker.finish()
    assert read(tracker) == [("a", 3, 1.0), ("b", 3, 2.0), ("c", 4, 3.0), ("d", 4, 4.0)]


def test_a_row_that_waits_is_written_at_the_end(tracker, read):
    tracker.log({"a": 1.0}, commit=False)
    tracker.finish()
    assert read(tracker) == [("a", 0, 1.0)]


def test_numbers_of_any_library_are_metrics(tracker, read):
    torch = pytest.importorskip("torch")
    row = {
        "int": 2,
        "bool": True,
        "np": np.float32(0.5),
        "np_bool": np.bool_(False),
        "np_one": np.array([3.0]),
        "torch": torch.tensor(4.0),
        "torch_one": torch.tensor([5]),
        "nan": math.nan,
        "inf": -math.inf,
        "nested": {"x": 1, "deep": {"y": 2}},
    }
    tracker.log(row)
    tracker.finish()
    found = {key: value for key, _, value in read(tracker)}
    assert math.isnan(found.pop("nan"))
    assert found == {
        "int": 2.0,
        "bool": 1.0,
        "np": 0.5,
        "np_bool": 0.0,
        "np_one": 3.0,
        "torch": 4.0,
        "torch_one": 5.0,
        "inf": -math.inf,
        "nested/x": 1.0,
        "nested/deep/y": 2.0,
    }
    assert read_events(tracker) == []


def test_what_is_no_number_is_an_event_of_its_row(tracker, read, said):
    tracker.log({"loss": 1.0, "phase": "warm-up", "none": None, "list": [1, "b"]}, step=4)
    tracker.log({"array": np.arange(3), "object": object, "x" * 300: 1.0}, step=5)
    tracker.finish()
    assert read(tracker) == [("loss", 4, 1.0)]
    first, second = read_events(tracker)
    assert first == (4, {"phase": "warm-up", "none": None, "list": [1, "b"]})
    assert second[1]["array"] == "[0 1 2]"
    assert set(second[1]) == {"array", "object", "x" * 300}
    assert said() == []


def test_odd_names_are_stored_and_warned_of_once(tracker):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracker.log({"mean@1": 0.5})
        tracker.log({"mean@1": 0.25, "text": "x"})
    assert [str(warning.message).split()[1] for warning in caught] == ["'mean@1'"]
    tracker.log_table("tab@1", ["a"], [[1]])
    tracker.finish()
    session = quark.open_run(tracker.run_id, ".")
    assert [r.value for r in quark.MetricsLogger(session).read(metric_key="mean@1")] == [0.5, 0.25]
    assert len(quark.ArtifactStore(session).read(artifact_key="tab@1")) == 1


def test_a_row_is_kept_where_warnings_are_errors(tracker, read):
    tracker.log({"mean@1": 0.5, "a": 1.0})
    tracker.finish()
    assert [value for _, _, value in read(tracker)] == [0.5, 1.0]


@pytest.mark.parametrize("step", [-1, "three", 1.5, math.nan, 2**70, object()])
def test_a_bad_step_costs_its_row_and_no_more(tracker, read, said, step):
    tracker.log({"a": 1.0}, step=step)
    tracker.log({"a": 2.0}, step=np.int64(3))
    tracker.log({"a": 3.0}, step=4.0)
    tracker.finish()
    assert read(tracker) == [("a", 3, 2.0), ("a", 4, 3.0)]
    assert len(said()) == 1
    assert "step must be a non-negative integer" in said()[0]


@pytest.mark.parametrize("metrics", [None, 3, "text", [1], object()])
def test_what_is_no_row_raises_nothing(tracker, read, said, metrics):
    tracker.log(metrics)
    tracker.log(metrics, commit=False)
    tracker.log_config(metrics)
    tracker.log_table("t", metrics, metrics)
    tracker.log_image("i", metrics)
    tracker.log_artifacts(metrics)
    tracker.watch(metrics)
    tracker.log({"a": 1.0}, step=9)
    tracker.finish()
    assert read(tracker) == [("a", 9, 1.0)]
    assert said() != []


def test_a_reason_is_logged_once(tracker, said):
    for _ in range(5):
        tracker.log({"a": 1.0}, step=-1)
    assert len(said()) == 1


def test_config_is_merged_and_redacted():
    tracker = quark.setup_tracker("p", backends="quark", config={"lr": 0.1, "layers": 2})
    tracker.log_config({"lr": 0.2, "api_key": "sk-verysecretverysecret1234"})
    tracker.log_config({"seed": 1})
    tracker.finish()
    session = quark.open_run(tracker.run_id, ".")
    stored = session.open_run.reader.load_run(tracker.run_id).config.values
    assert {k: stored[k] for k in ("lr", "layers", "seed")} == {"lr": 0.2, "layers": 2, "seed": 1}
    assert "verysecret" not in json.dumps(stored)


def test_config_is_merged_into_that_of_a_session_that_was_there():
    session = quark.start_run(project="p", config={"lr": 0.1})
    tracker = quark.Tracker(session=session)
    tracker.log_config({"seed": 1})
    tracker.finish()
    stored = quark.open_run(session.run_id).open_run.reader.load_run(session.run_id)
    assert stored.config.values == {"lr": 0.1, "seed": 1}
    assert stored.state == "completed"


def test_tables_of_any_form_are_kept(tracker):
    tracker.log({"a": 1.0}, step=6)
    tracker.log_table("eval/t", ["n", "n"], [[1, "a,b"], [2.5], [None, object, 3]])
    tracker.log_table("empty", [], [])
    tracker.finish()
    store = quark.ArtifactStore(quark.open_run(tracker.run_id, "."))
    full, empty = store.read(artifact_type="table")
    assert (full.artifact_key, full.step) == ("eval/t", 6)
    assert store.load(full) == {
        "columns": ["n", "n.1", "column_2"],
        "rows": [[1, "a,b", None], [2.5, None, None], [None, str(object), 3]],
    }
    assert store.load(empty) == {"columns": [], "rows": []}


def test_images_are_kept_with_their_caption(tracker, tmp_path):
    pytest.importorskip("PIL")
    from PIL import Image

    Image.new("RGB", (3, 2)).save(tmp_path / "i.png")
    tracker.log_image("samples", str(tmp_path / "i.png"), caption="first")
    tracker.log_image("gone", tmp_path / "absent.png")
    tracker.finish()
    store = quark.ArtifactStore(quark.open_run(tracker.run_id, "."))
    (record,) = store.read(artifact_type="image")
    assert record.metadata["caption"] == "first"
    assert store.load(record) == (tmp_path / "i.png").read_bytes()


def test_files_and_folders_are_artifacts_below_their_label(tracker, tmp_path, said):
    (tmp_path / "report.md").write_text("# done")
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "logs" / "a.txt").write_text("a")
    (tmp_path / "logs" / "deep" / "b.txt").write_text("b")
    tracker.log_artifacts(
        {"Report": "report.md", "logs": str(tmp_path / "logs"), "gone": "absent.txt"}
    )
    tracker.finish()
    store = quark.ArtifactStore(quark.open_run(tracker.run_id, "."))
    found = {record.artifact_key: store.load(record) for record in store.read()}
    assert found == {"Report/report.md": b"# done", "logs/a.txt": b"a", "logs/deep/b.txt": b"b"}
    assert len(said()) == 1
    assert "absent.txt does not exist" in said()[0]


def test_many_threads_may_log(tracker, read):
    def log_some(name):
        for step in range(200):
            tracker.log({name: float(step)}, step=step)

    threads = [threading.Thread(target=log_some, args=(f"m{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracker.finish()
    found = read(tracker)
    for n in range(4):
        steps = [step for key, step, _ in found if key == f"m{n}"]
        assert steps == list(range(200))


def test_a_halt_by_a_monitor_comes_through(tracker):
    alert = AlertRecord("r", "w", 0, 0, 0, 0, "rule", "runtime", "critical", "t", "s", "f", "i")
    tracker.session.open_run.halt(TrainingHalted("stop", alert))
    with pytest.raises(TrainingHalted):
        tracker.log({"a": 1.0})
    tracker.log({"a": 2.0})


def test_after_the_end_calls_do_nothing(tracker, read, said):
    tracker.log({"a": 1.0})
    tracker.finish()
    tracker.finish()
    tracker.log({"a": 2.0})
    tracker.log_config({"x": 1})
    tracker.log_table("t", ["a"], [[1]])
    tracker.log_artifacts({"x": "y"})
    assert tracker.watch(None) is None
    assert read(tracker) == [("a", 0, 1.0)]
    assert quark.ArtifactStore(quark.open_run(tracker.run_id, ".")).read() == ()


def test_a_run_that_was_ended_elsewhere_costs_a_warning(tracker, said):
    tracker.session.end_run()
    tracker.log({"a": 1.0})
    tracker.finish()
    assert len(said()) == 1
    assert "the run has ended" in said()[0]


# The files of a CSV backend, where people look for them.


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_puts_its_files_into_the_folder(tmp_path):
    out = tmp_path / "outputs" / "run-001"
    tracker = quark.setup_tracker("p", backends="csv", config={"lr": 0.1}, outdir=out)
    tracker.log({"loss": 0.5, "acc": 0.1})
    tracker.log({"loss": 0.25})
    tracker.log({"grad": 1.0}, step=5)
    tracker.log_config({"seed": 3, "lr": 0.2})
    tracker.log_table("preds", ["id", "text"], [[1, "a,b"], [2, 'c"\n']])
    tracker.log_table("metrics", ["x"], [[1]])
    tracker.finish()
    assert read_table(out / "metrics.csv") == [
        ["step", "loss", "acc", "grad"],
        ["0", "0.5", "0.1", ""],
        ["1", "0.25", "", ""],
        ["5", "", "", "1.0"],
    ]
    assert json.loads((out / "config.json").read_text()) == {"lr": 0.2, "seed": 3}
    assert read_table(out / "preds.csv") == [["id", "text"], ["1", "a,b"], ["2", 'c"\n']]
    assert read_table(out / "table-metrics.csv") == [["x"], ["1"]]
    assert {path.name for path in out.iterdir()} == {
        *(".quark", "metrics.csv", "config.json", "preds.csv", "table-metrics.csv")
    }


def test_an_image_is_read_back_from_the_csv_mirror(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    pil.new("RGB", (3, 2), (255, 0, 0)).save(tmp_path / "i.png")
    with quark.setup_tracker("p", "csv", config={"lr": 0.1}, outdir="out") as tracker:
        tracker.log_image("samples", "i.png", caption="first")
        tracker.log_table("preds", ["id"], [[1], [2]])
    opened = quark.open_run(tracker.run_id, "out", backend="csv")
    store = quark.ArtifactStore(opened)
    (image,) = store.read(artifact_type="image")
    assert image.metadata["caption"] == "first"
    assert store.load(image) == (tmp_path / "i.png").read_bytes()
    (table,) = store.read(artifact_type="table")
    assert store.load(table) == {"columns": ["id"], "rows": [[1], [2]]}
    assert opened.open_run.reader.load_run(tracker.run_id).config.values == {"lr": 0.1}


@pytest.mark.long
def test_a_second_run_in_the_folder_replaces_rows_and_merges_config(tmp_path):
    for name, value in (("first", 1.0), ("second", 2.0)):
        with quark.setup_tracker("p", "csv", config={name: value}, outdir=tmp_path) as tracker:
            tracker.log({name: value})
    assert read_table(tmp_path / "metrics.csv") == [["step", "second"], ["0", "2.0"]]
    assert json.loads((tmp_path / "config.json").read_text()) == {"first": 1.0, "second": 2.0}


def test_a_metric_named_as_an_axis_has_no_second_column(tmp_path):
    with quark.setup_tracker("p", "csv", outdir=tmp_path) as tracker:
        for step in (3, 4):
            tracker.log({"step": step, "epoch": 1, "loss": float(step)})
    assert read_table(tmp_path / "metrics.csv") == [
        *(["step", "epoch", "loss"], ["3", "1.0", "3.0"], ["4", "1.0", "4.0"])
    ]


@pytest.mark.parametrize("content", ["not json", "[1, 2]", ""])
def test_a_config_file_that_is_none_is_replaced(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    quark.setup_tracker("p", "csv", config={"a": 1}, outdir=tmp_path).finish()
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_the_folder_is_the_working_directory_by_default(tmp_path):
    with quark.setup_tracker("p", "csv") as tracker:
        tracker.log({"a": 1.0})
    assert read_table(tmp_path / "metrics.csv") == [["step", "a"], ["0", "1.0"]]
