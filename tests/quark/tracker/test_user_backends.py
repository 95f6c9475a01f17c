"""Backends of one's own: in order, on a thread of their own, and never in training's way."""

import json
import subprocess
import sys
import threading

import pytest
from recorded_calls import Recorder

import quark
from quark.tracker import call_worker
from quark.tracker import tracker as tracker_module


class Base(quark.TrackerBackend):
    name = "base"

    def log(self, metrics, step=None, commit=True):
        pass

    def log_config(self, config):
        pass

    def finish(self):
        pass


def test_every_call_comes_in_order_and_as_it_was_made(tmp_path, read):
    backend = Recorder()
    tracker = quark.Tracker([backend])
    model = object()
    tracker.log_config({"lr": 0.1})
    tracker.log({"a": 1, "text": "x"}, step=3)
    tracker.log({"b": True}, commit=False)
    tracker.log_table("t", ("n",), [(1,), (2,)])
    tracker.log_image("i", "i.png", caption="c")
    tracker.log_artifacts({"Report": tmp_path})
    tracker.watch(model, log="all")
    tracker.log({"c": 2.5})
    tracker.finish()
    assert backend.calls == [
        ("log_config", {"lr": 0.1}),
        ("log", {"a": 1, "text": "x"}, 3, True),
        ("log", {"b": True}, None, False),
        ("log_table", "t", ["n"], [[1], [2]]),
        ("log_image", "i", "i.png", "c"),
        ("log_artifacts", {"Report": str(tmp_path)}),
        ("watch", model, {"log": "all"}),
        ("log", {"c": 2.5}, None, True),
        ("finish",),
    ]
    # The run has them beside it.
    assert read(tracker) == [("a", 3, 1.0), ("b", 4, 1.0), ("c", 4, 2.5)]
    (report,) = tracker.report_calls()
    assert (report.done, report.failed, report.waiting, report.dropped) == (9, 0, 0, 0)


def test_what_the_caller_changes_later_changes_nothing():
    backend = Recorder()
    tracker = quark.Tracker([backend])
    row, config, table = {"a": 1}, {"lr": 1}, [[1]]
    tracker.log(row)
    tracker.log_config(config)
    tracker.log_table("t", ["n"], table)
    row["a"] = config["lr"] = table[0][0] = 9
    tracker.finish()
    assert backend.calls[:3] == [
        ("log", {"a": 1}, None, True),
        ("log_config", {"lr": 1}),
        ("log_table", "t", ["n"], [[1]]),
    ]


def test_numbers_of_tensors_are_read_at_the_call():
    torch = pytest.importorskip("torch")
    backend = Recorder()
    tracker = quark.Tracker([backend])
    loss = torch.tensor(1.0)
    tracker.log({"loss": loss, "table": (kept := torch.ones(3))})
    loss.add_(5)
    tracker.finish()
    assert backend.calls[0][1]["loss"] == 1.0
    assert backend.calls[0][1]["table"] is kept


def test_a_class_is_made_with_what_the_tracker_was_given(recorder):
    config = {"lr": 1}
    tracker = quark.setup_tracker(
        "p", "recorder", config=config, outdir="out", rank=0, extra=5, storage_dir="store"
    )
    backend = tracker.get_backend("recorder")
    tracker.finish()
    assert backend.arguments == {
        "project_name": "p",
        "config": config,
        "outdir": "out",
        "rank": 0,
        "extra": 5,
    }


def test_a_name_of_one_s_own_comes_before_quark_s(tmp_path):
    quark.register_backend("csv", Recorder)
    with quark.setup_tracker("p", "csv") as tracker:
        assert isinstance(tracker.get_backend("csv"), Recorder)
    assert not (tmp_path / "metrics.csv").exists()


def test_all_calls_come_on_one_thread_that_is_not_the_caller_s():
    seen = []

    class Looking(Base):
        def __init__(self, **_arguments):
            seen.append(threading.get_ident())

        def log(self, metrics, step=None, commit=True):
            seen.append(threading.get_ident())

        finish = log_config = lambda self, *_: seen.append(threading.get_ident())

    quark.register_backend("looking", Looking)
    with quark.setup_tracker("p", "looking") as tracker:
        tracker.log({"a": 1})
        tracker.log_config({})
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), KeyboardInterrupt()])
def test_a_backend_that_raises_is_told_of_once_and_called_again(said, read, error):
    calls = []

    class Raising(Base):
        def log(self, metrics, step=None, commit=True):
            calls.append(metrics)
            raise error

    backend, beside = Raising(), Recorder()
    tracker = quark.Tracker([backend, beside])
    for step in range(3):
        tracker.log({"a": step})
    tracker.finish()
    assert calls == [{"a": 0}, {"a": 1}, {"a": 2}]
    assert len(beside.calls) == 4
    assert len(read(tracker)) == 3
    assert len(said()) == 1
    assert f"tracker backend base: log() failed: {type(error).__name__}" in said()[0]
    assert [(r.done, r.failed) for r in tracker.report_calls()] == [(1, 3), (4, 0)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("No module named 'x'"), "not available (missing dependency: No module"),
        (RuntimeError("no key"), "was not created: RuntimeError: no key"),
        (SystemExit(1), "was not created: SystemExit: 1"),
    ],
)
def test_a_constructor_that_raises_leaves_its_backend_out(said, error, text):
    def make(**_arguments):
        raise error

    quark.register_backend("mine", make)
    with quark.setup_tracker("p", "csv,mine") as tracker:
        assert tracker.get_backend("mine") is None
        assert tracker.get_backend("csv") is not None
        tracker.log({"a": 1})
    assert len(said()) == 1
    assert text in said()[0]


def test_a_class_that_lacks_a_method_is_left_out(said):
    class Half(quark.TrackerBackend):
        def __init__(self, **_arguments):
            pass

        def log(self, metrics, step=None, commit=True):
            pass

    quark.register_backend("half", Half)
    with quark.setup_tracker("p", "half,quark") as tracker:
        assert tracker.get_backend("half") is None
    assert "abstract" in said()[0]


def test_a_backend_that_hangs_costs_nothing_but_its_own_calls(monkeypatch, said, read):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "10")
    release = threading.Event()

    class Hanging(Base):
        def log(self, metrics, step=None, commit=True):
            release.wait(60)

    backend, beside = Hanging(), Recorder()
    tracker = quark.Tracker([backend, beside])
    for step in range(100):
        tracker.log({"a": step})
    tracker.session.flush()
    tracker.finish()
    assert len(read(tracker)) == 100
    assert len(beside.calls) == 101
    assert any("tracker backend base hangs in log(); 100 calls were not made" in t for t in said())
    release.set()


def test_a_constructor_that_hangs_is_not_waited_for(monkeypatch, said, read):
    monkeypatch.setattr(tracker_module, "_START_TIMEOUT_S", 0.2)
    release = threading.Event()
    made = []

    def make(**_arguments):
        release.wait(60)
        made.append(Recorder())
        return made[0]

    quark.register_backend("slow", make)
    tracker = quark.setup_tracker("p", "slow")
    assert "tracker backend slow is not created yet; its calls wait" in said()
    assert tracker.get_backend("slow") is None
    tracker.log({"a": 1})
    release.set()
    tracker.finish()
    assert made[0].calls == [("log", {"a": 1}, None, True), ("finish",)]
    assert read(tracker) == [("a", 0, 1.0)]


def test_too_many_calls_are_counted_and_dropped(monkeypatch, said):
    monkeypatch.setattr(call_worker, "_MAX_WAITING", 10)
    release, entered = threading.Event(), threading.Event()

    class Slow(Recorder):
        def log(self, metrics, step=None, commit=True):
            entered.set()
            release.wait(60)
            super().log(metrics, step, commit)

    backend = Slow()
    tracker = quark.Tracker([backend])
    tracker.log({"a": 0})
    assert entered.wait(60)
    for step in range(1, 31):
        tracker.log({"a": step})
    (report,) = tracker.report_calls()
    assert (report.waiting, report.dropped) == (10, 20)
    release.set()
    tracker.finish()
    assert [call[1]["a"] for call in backend.calls[:-1]] == list(range(11))
    assert len([text for text in said() if "calls wait" in text]) == 1


def test_methods_that_are_not_overridden_do_nothing(said):
    tracker = quark.Tracker([Base()])
    tracker.log_table("t", ["a"], [[1]])
    tracker.log_artifacts({})
    tracker.finish()
    assert said() == []


def test_mirrors_and_one_s_own_stand_side_by_side(tmp_path):
    backend = Recorder()
    csv = quark.CSVBackend(tmp_path / "out")
    tracker = quark.Tracker([csv, backend])
    assert tracker.get_backend("csv") is csv
    # A mirror has what the run has, so this reaches all.
    csv.log({"a": 1})
    csv.log_config({"lr": 1})
    csv.log_table("t", ["n"], [[1]])
    csv.finish()
    tracker.finish()
    assert [call[0] for call in backend.calls] == ["log", "log_config", "log_table", "finish"]
    assert (tmp_path / "out" / "metrics.csv").read_text() == "step,a\n0,1.0\n"
    assert (tmp_path / "out" / "t.csv").read_text() == "n\n1\n"
    assert csv.run.id == tracker.run_id


def test_a_mirror_stands_alone(tmp_path, read):
    csv = quark.CSVBackend(outdir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    csv.log({"a": 1}, commit=False)
    csv.log({"a": 2})
    csv.log_config({"lr": 1})
    csv.log_table("t", ["n"], [[1]])
    csv.finish()
    csv.finish()
    assert (tmp_path / "out" / "metrics.csv").read_text() == "step,a\n0,1.0\n1,2.0\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"lr": 1}
    assert (tmp_path / "out" / "t.csv").read_text() == "n\n1\n"
    assert quark.open_run(csv.run.id, tmp_path / "out").status == "completed"


@pytest.mark.long
def test_a_mirror_that_stands_alone_is_finished_by_the_end_of_the_process(tmp_path):
    code = "import quark, sys; quark.CSVBackend(outdir=sys.argv[1]).log({'a': 1})"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=200)
    assert (tmp_path / "metrics.csv").read_text() == "step,a\n0,1.0\n"


@pytest.mark.long
def test_a_mirror_that_stood_alone_may_be_given_to_a_tracker(tmp_path):
    csv = quark.CSVBackend(outdir=tmp_path)
    csv.log({"a": 1})
    alone = csv.run.id
    with quark.Tracker([csv]) as tracker:
        assert tracker.run_id != alone
        csv.log({"b": 2})
        csv.finish()
        csv.log({"b": 3})
    assert quark.open_run(alone, tmp_path).status == "completed"
    assert (tmp_path / "metrics.csv").read_text() == "step,b\n0,2.0\n1,3.0\n"


def test_a_flush_waits_for_backends_of_one_s_own(said):
    release = threading.Event()

    class Slow(Recorder):
        def log(self, metrics, step=None, commit=True):
            release.wait(60)
            super().log(metrics, step, commit)

    class Raising(Base):
        def log(self, metrics, step=None, commit=True):
            raise ValueError("no")

    slow = Slow()
    with quark.Tracker([slow, Raising()]) as tracker:
        for step in range(100):
            tracker.log({"a": step})
        assert not tracker.flush(0.05)
        assert len(slow.calls) < 100
        release.set()
        assert tracker.flush()
        assert [call[1] for call in slow.calls] == [{"a": step} for step in range(100)]
        assert [report.waiting for report in tracker.report_calls()] == [0, 0]
        assert len(quark.MetricsLogger(quark.open_run(tracker.run_id)).read()) == 100
    assert tracker.flush()


def test_a_backend_that_flushes_its_own_tracker_is_not_waited_for():
    found = []

    class Impatient(Base):
        def log(self, metrics, step=None, commit=True):
            found.append(tracker.flush(60))

    tracker = quark.Tracker([Impatient()])
    tracker.log({"a": 1})
    assert tracker.flush()
    assert found == [False]
    tracker.finish()


def test_a_flush_that_cannot_be_had_says_so(tmp_path, said):
    assert quark.setup_tracker("p", "none").flush()
    with quark.setup_tracker("p", "quark") as tracker:
        assert not tracker.flush("soon")
    assert any(text.startswith("tracker: flush: ") for text in said())


def test_a_mirror_of_another_rank_does_nothing(tmp_path):
    csv = quark.CSVBackend(tmp_path, rank=3)
    csv.log({"a": 1})
    csv.finish()
    assert (csv.run, csv.run_url) == (None, None)
    tracker = quark.Tracker([csv])
    assert not tracker.active
    assert list(tmp_path.iterdir()) == []


def test_of_two_backends_with_one_name_the_last_is_found():
    first, last = Recorder(), Recorder()
    with quark.Tracker([first, last]) as tracker:
        assert tracker.get_backend("recorder") is last
        tracker.log({"a": 1})
    assert first.calls == last.calls


def test_nothing_is_left_of_a_tracker_without_backends(tmp_path):
    tracker = quark.Tracker([])
    tracker.log({"a": 1})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []
