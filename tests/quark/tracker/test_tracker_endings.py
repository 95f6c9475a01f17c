"""The end of a tracker's run and of its process, forks, and what watches a model."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quark
from quark_core.records.query import Query


def load_run(tracker):
    return quark.open_run(tracker.run_id, ".").open_run.reader.load_run(tracker.run_id)


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_exception_marks_the_run_and_comes_through(recorder, error, status):
    tracker = quark.setup_tracker("p", "recorder")
    with pytest.raises(type(error)), tracker:
        tracker.log({"a": 1}, commit=False)
        raise error
    assert load_run(tracker).state == status
    assert tracker.get_backend("recorder").calls[-1] == ("finish",)


def test_without_one_the_run_is_completed():
    with quark.setup_tracker("p", "quark") as tracker:
        tracker.log({"a": 1})
    assert load_run(tracker).state == "completed"


SCRIPT = """
import os, quark, signal, sys
class Mine(quark.TrackerBackend):
    def __init__(self, **_):
        self.file = open("mine.txt", "a")
    def log(self, metrics, step=None, commit=True):
        print("log", metrics, file=self.file)
    def log_config(self, config):
        pass
    def finish(self):
        print("finish", file=self.file)
        self.file.close()
quark.register_backend("mine", Mine)
tracker = quark.setup_tracker("p", "csv,mine")
tracker.log({"a": 1.0})
tracker.log({"b": 2.0}, commit=False)
print(tracker.run_id, flush=True)
"""


def run_script(child_environment, tmp_path, rest):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + rest],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**child_environment, "PYTHONPATH": str(Path(quark.__file__).parents[1])},
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rest", "code", "status"),
    [
        ("", 0, "completed"),
        ("raise ValueError('x')", 1, "failed"),
        ("sys.exit(3)", 3, "interrupted"),
    ],
)
def test_a_process_that_ends_finishes_its_trackers(tmp_path, child_environment, rest, code, status):
    done = run_script(child_environment, tmp_path, rest)
    assert done.returncode == code
    session = quark.open_run(done.stdout.strip(), tmp_path)
    assert session.open_run.reader.load_run(session.run_id).state == status
    values = [(r.metric_key, r.step) for r in quark.MetricsLogger(session).read()]
    assert values == [("a", 0), ("b", 1)]
    assert (tmp_path / "mine.txt").read_text() == ("log {'a': 1.0}\nlog {'b': 2.0}\nfinish\n")
    assert (tmp_path / "metrics.csv").read_text() == "step,a,b\n0,1.0,\n1,,2.0\n"


@pytest.mark.long
def test_a_killed_run_is_resumed_with_every_row_once(tmp_path, child_environment):
    done = run_script(
        child_environment,
        tmp_path,
        "for step in range(500): tracker.log({'c': float(step)}, step=step)\n"
        "tracker.session.flush('journaled')\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert done.returncode == -9
    run_id = done.stdout.strip()
    backends = [f"csv:?publish={tmp_path}"]
    session = quark.resume_run(run_id=run_id, backends=backends)
    with quark.Tracker(session=session) as tracker:
        tracker.log({"c": 500.0}, step=500)
    expected = [("c", step) for step in range(501)]
    found = quark.MetricsLogger(quark.open_run(run_id)).read(metric_key="c")
    assert [(r.metric_key, r.step) for r in found] == expected
    mirrored = quark.open_run(run_id, backend="csv")
    deadline = time.monotonic() + 60
    while len(quark.MetricsLogger(mirrored).read(metric_key="c")) < 501:
        # What the killed process left is delivered behind the resumed one.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rows = quark.MetricsLogger(mirrored).read(metric_key="c")
    assert [(r.metric_key, r.step) for r in rows] == expected


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_logs_to_the_run_and_leaves_the_backends_alone(tmp_path, child_environment):
    done = run_script(
        child_environment,
        tmp_path,
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    tracker.log({'child': 1.0}, step=7)\n"
        "    tracker.finish()\n"
        "    sys.exit(0)\n"
        "os.waitpid(pid, 0)\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    session = quark.open_run(done.stdout.strip(), tmp_path)
    values = [(r.metric_key, r.step) for r in quark.MetricsLogger(session).read()]
    assert sorted(values) == [("a", 0), ("b", 1), ("child", 7)]
    assert (tmp_path / "mine.txt").read_text().count("finish") == 1


# Watching a model.


def test_a_watched_model_is_measured_at_the_rows(said):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with quark.setup_tracker("p", "quark") as tracker:
        watch = tracker.watch(model, optimizer=optimizer, log="all", log_freq=2, telemetry=False)
        assert watch is not None
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).pow(2).mean()
            loss.backward()
            optimizer.step()
            tracker.log({"loss": loss.detach()}, step=step)
    session = quark.open_run(tracker.run_id)
    reader = session.open_run.reader
    for kind in ("layer", "parameter"):
        columns = reader.read(session.run_id, kind, Query())
        assert set(columns["step"].tolist()) == {0, 2, 4}, kind
    assert not model._forward_hooks
    assert said() == []


def test_what_cannot_be_watched_costs_a_warning(said):
    with quark.setup_tracker("p", "quark") as tracker:
        assert tracker.watch("no model") is None
        tracker.log({"a": 1})
    assert len(said()) == 1
    assert said()[0].startswith("tracker: watch: ")
