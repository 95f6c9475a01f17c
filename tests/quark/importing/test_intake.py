"""What every importer has in common: each point once, whoever is killed or imports as well."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import quark
from quark.importing.importer import ImportOptions, open_intake
from quark.importing.neutral_run import ForeignRun, ImportFailure, PointList, Portion, RunFacts
from quark_core.runs.backend_choice import open_reader


class CountedRun(ForeignRun):
    """A run with so many points, in portions; `between` is called before each."""

    def __init__(self, count=100, size=10, between=None, **facts):
        self.key = "counted"
        self.count, self.size = count, size
        self.between = between or (lambda number: None)
        self.facts = RunFacts(
            **{"identity": "counted", "project": "p", "started_us": 10**15, "ended_us": 10**15 + 5}
            | facts
        )

    def describe(self):
        return self.facts

    def read(self, position, losses):
        at = position.get("at", 0)
        while at < self.count:
            self.between(at)
            points = PointList()
            for step in range(at, min(at + self.size, self.count)):
                points.add("loss", step, step / 2, 1e9 + step)
            at += len(points)
            yield Portion(position={"at": at}, points=points.take())


@pytest.fixture
def intake(store):
    with open_intake(store, "test", ImportOptions()) as opened:
        yield opened


def steps(store, run_id, key="loss"):
    columns = quark.MetricsLogger(quark.open_run(run_id, storage_dir=store)).columns(metric_key=key)
    return columns["step"].tolist()


def test_a_run_that_breaks_off_goes_on_behind_what_was_stored(intake, store):
    def fail(at):
        if at == 50:
            raise ImportFailure("the source is gone")

    broken = intake.take(CountedRun(between=fail))
    assert broken.failure == "the source is gone"
    assert broken.points == 50
    record = quark.open_run(broken.run_id, storage_dir=store).context.run
    assert record.status == "interrupted"
    rest = intake.take(CountedRun())
    assert (rest.points, rest.is_new) == (50, False)
    assert steps(store, rest.run_id) == list(range(100))
    assert quark.open_run(rest.run_id, storage_dir=store).context.run.status == "completed"


def test_two_that_import_one_run_at_once_bring_each_point_once(store):
    results, errors = [], []
    barrier = threading.Barrier(2)

    def work():
        try:
            with open_intake(store, "test", ImportOptions()) as opened:
                barrier.wait(60)
                results.append(opened.take(CountedRun(400, 10)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    run_id = results[0].run_id
    for _ in range(5):
        with open_intake(store, "test", ImportOptions()) as opened:
            last = opened.take(CountedRun(400, 10))
        if last.failure is None:
            break
    assert sum(result.points for result in [*results, last]) == 400
    assert steps(store, run_id) == list(range(400))


def test_another_import_between_two_portions_is_seen_even_where_its_batch_was_compacted(store):
    with open_intake(store, "test", ImportOptions()) as first:
        done = []

        def other(at):
            if at == 30 and not done:
                done.append(True)
                with open_intake(store, "test", ImportOptions()) as second:
                    assert second.take(CountedRun(60, 7)).points == 30
                from quark_backends.embedded.compaction_process import compact_root

                compact_root(store)

        result = first.take(CountedRun(100, 10, other))
    assert result.failure is None
    assert steps(store, result.run_id) == list(range(100))


def test_what_people_have_edited_stays_and_what_the_tool_changes_comes(intake, store):
    run = CountedRun(name="old", tags=["a", "b"], notes="n", config={"lr": 1})
    run_id = intake.take(run).run_id
    quark.edit_run(run_id, name="mine", remove_tags=["b"], storage_dir=store)
    intake.take(run)
    record = quark.open_run(run_id, storage_dir=store).context.run
    assert (record.name, record.tags) == ("mine", ("a",))
    run.facts = replace(run.facts, notes="m", tags=["a", "b", "c"], config={"lr": 2})
    intake.take(run)
    stored = open_reader(store).load_run(run_id)
    assert (stored.run.name, stored.run.notes, stored.run.tags) == ("mine", "m", ("a", "c"))
    assert dict(stored.config.values) == {"lr": 2}


def test_a_run_that_goes_on_is_interrupted_until_its_tool_says_how_it_ended(intake, store):
    run = CountedRun(status="running", ended_us=None)
    run_id = intake.take(run).run_id
    assert quark.open_run(run_id, storage_dir=store).context.run.status == "interrupted"
    run.facts = replace(run.facts, status="failed", ended_us=10**15 + 9)
    intake.take(run)
    record = quark.open_run(run_id, storage_dir=store).context.run
    assert (record.status, record.ended_at) == ("failed", "2001-09-09T01:46:40.000009Z")


def test_a_run_taken_up_again_hides_what_it_did_again(intake, store):
    class Restarted(CountedRun):
        def read(self, position, losses):
            if not position:
                yield next(super().read({}, losses))
            points = PointList()
            for step in (5, 6):
                points.add("loss", step, 100.0, 2e9)
            yield Portion(position={"at": 100}, points=points.take(), from_step=5)

    result = intake.take(Restarted())
    assert steps(store, result.run_id) == [0, 1, 2, 3, 4, 5, 6]
    record = quark.open_run(result.run_id, storage_dir=store).context.run
    assert (record.attempt, record.status) == (1, "completed")


def test_what_no_record_can_hold_is_left_out_and_told(intake, store):
    class Odd(CountedRun):
        def read(self, position, losses):
            points = PointList()
            points.add("loss", -3, 1.0, 1e9)
            points.add("n" * 300, 1, 1.0, 1e9)
            points.add("late", 1, 1.0, 1e12)
            points.add("fine\ud800", 1, 1.0, 1e9)
            points.add("fine", 1, float("inf"), float("nan"))
            yield Portion(position={"at": 1}, points=points.take())

    result = intake.take(Odd())
    assert result.failure is None
    assert result.points == 1
    assert sorted(loss.name[:4] for loss in result.losses) == ["fine", "late", "loss", "nnnn"]


def test_names_that_could_collide_stay_apart(intake, store):
    class Colliding(CountedRun):
        def read(self, position, losses):
            points = PointList()
            for place, name in enumerate(("a@b", "a_x40_b", "a//b", "a/b", "a b")):
                points.add(name, place, float(place), 1e9)
            yield Portion(position={"at": 1}, points=points.take())

    result = intake.take(Colliding())
    columns = quark.MetricsLogger(quark.open_run(result.run_id, storage_dir=store)).columns()
    assert len(set(columns["metric_key"].tolist())) == 5
    assert sorted(columns["value"].tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.long
def test_a_run_in_the_trash_and_one_that_was_removed_are_left_there(intake, store):
    from click.testing import CliRunner

    from quark.cli.main import cli

    run_id = intake.take(CountedRun()).run_id
    CliRunner().invoke(cli, ["rm", run_id, "-d", str(store), "--yes"], catch_exceptions=False)
    assert "trash" in intake.take(CountedRun()).failure
    CliRunner().invoke(cli, ["gc", "-d", str(store), "--yes"], catch_exceptions=False)
    again = intake.take(CountedRun())
    assert again.failure is not None
    assert again.points == 0


@pytest.mark.long
def test_a_run_of_our_own_under_that_id_is_left_alone(store):
    session = quark.start_run(project="p", storage_dir=store)
    session.end_run()
    with open_intake(store, "test", ImportOptions()) as opened:
        result = opened.take(CountedRun(run_id=session.run_id))
    assert result.failure is None
    assert result.points == 0
    assert "not changed" in result.losses[0].reason


@pytest.mark.long
def test_an_import_beside_a_training_disturbs_neither(store):
    session = quark.start_run(project="p", storage_dir=store)
    metrics = quark.MetricsLogger(session)

    def train(at):
        for step in range(at, at + 10):
            metrics.log("own", step, step=step)

    with open_intake(store, "test", ImportOptions()) as opened:
        result = opened.take(CountedRun(between=train))
    assert metrics.columns(metric_key="own")["step"].tolist() == list(range(100))
    session.end_run()
    assert steps(store, result.run_id) == list(range(100))


def test_a_million_points_of_columns_have_the_same_values(intake, store):
    from quark.importing.conversion import encode_points
    from quark.importing.neutral_run import Losses, Points
    from quark_core.records.codec import decode_body

    rng = np.random.default_rng(0)
    count = 40_000
    given = Points(
        [f"m{place}" for place in range(300)],
        rng.integers(0, 300, count),
        rng.integers(-1, 2**62, count),
        rng.normal(size=count),
        rng.integers(0, 2 * 10**15, count),
        rng.integers(0, 9, count),
    )
    bodies = [decode_body(body) for _, body in encode_points(given, Losses(), 7)]
    assert sum(body.count for body in bodies) == count

    def join(name):
        return [value for body in bodies for value in body.to_list(name)]

    assert join("sequence") == list(range(7, count + 7))
    assert join("value") == given.values.tolist()
    assert join("time_us") == given.times_us.tolist()
    assert join("epoch") == given.epochs.tolist()
    assert join("step") == [None if step < 0 else step for step in given.steps.tolist()]
    assert join("metric_key") == [f"m{place}" for place in given.which.tolist()]


SLOW = """
import sys, time
sys.path.insert(0, {folder!r})
from test_intake import CountedRun
from quark.importing.importer import ImportOptions, open_intake
from pathlib import Path
def between(at):
    print(at, flush=True)
    time.sleep(600 if at >= 500 else 0.01)
with open_intake(Path({store!r}), "test", ImportOptions()) as intake:
    intake.take(CountedRun(1000, 10, between))
"""


@pytest.mark.sampled
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_who_is_killed_in_the_middle_has_left_nothing_half_and_nothing_twice(store, sign):
    code = SLOW.format(folder=os.path.dirname(__file__), store=str(store))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        while int(process.stdout.readline() or 999) < 300:
            pass
        process.send_signal(sign)
    with open_intake(store, "test", ImportOptions()) as opened:
        rest = opened.take(CountedRun(1000, 10))
    assert 0 < rest.points <= 700
    assert steps(store, rest.run_id) == list(range(1000))


@pytest.mark.long
def test_what_is_watched_comes_until_ctrl_c_and_then_ends(tmp_path, store, read_points):
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n0,1.0\n")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "quark", "import", "csv", str(path), "-d", str(store)),
            *("--watch", "--interval", "0.1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "1 point," in process.stderr.readline()
    with path.open("a") as file:
        file.write("1,0.5\n")
    assert "2 points" in process.stderr.readline()
    (run,) = open_reader(store).list_runs()
    assert run.state == "running"
    with path.open("a") as file:
        file.write("2,0.25\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    run_id = str(run.run.id)
    assert [(step, value) for step, value, _ in read_points(run_id, "loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, 0.25),
    ]
    assert quark.open_run(run_id, storage_dir=store).context.run.status == "completed"
