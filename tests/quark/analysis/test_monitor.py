import itertools
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import quark
from quark.analysis.monitor import TrainingMonitor
from quark.analysis.outputs import open_analysis
from quark_core.errors import InvalidRunStateError, QuarkError, SchemaValidationError
from quark_core.records import RECORD_TYPES

FAST = {"every_n_steps": 20, "min_interval_s": 0.02}
NO_FORK = not hasattr(os, "fork")


def start(path, **options):
    return quark.start_run(project="p", storage_dir=path, **options)


def wait(condition, timeout_s=60.0):
    """Wait until something is so; the deadline is for a test that fails."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def learn(metrics, steps=200, first=0):
    for step in range(first, first + steps):
        metrics.log("train/loss", math.exp(-step / 60) + 0.01 * (step % 3), step=step)


def break_down(metrics, step):
    metrics.log("train/loss", math.nan, step=step)


@contextmanager
def broken_run(path, **options):
    """A run whose loss has ceased to be finite, with a monitor that has noticed."""
    with start(path) as session:
        metrics = quark.MetricsLogger(session)
        watch = quark.monitor(session, **FAST, **options)
        learn(metrics)
        break_down(metrics, 200)
        wait(lambda: watch.halted if "halt_on" in options else watch.alerts)
        yield session, metrics, watch


def log_until_halted(metrics, first, value=math.nan, limit=100_000):
    for step in range(first, first + limit):
        metrics.log("train/loss", value, step=step)
        time.sleep(0.001)
    pytest.fail("nothing halted the training")


def stored(session):
    return open_analysis(session).read_outputs("alert", "monitor").to_records()


def monitor_threads():
    return [thread for thread in threading.enumerate() if thread.name == "training-monitor"]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The last look is waited for, however busy the machine is."""
    monkeypatch.setattr("quark.analysis.monitor._LAST_LOOK_S", 60.0)
    monkeypatch.setattr("quark.analysis.monitor._HAND_OVER_S", 60.0)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait(lambda: not monitor_threads())


def test_an_alert_arises_while_the_run_goes_on_in_every_place(tmp_path):
    seen = []
    with start(tmp_path) as session, quark.monitor(session, on_alert=seen.append, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        learn(metrics)
        break_down(metrics, 200)
        wait(lambda: seen)
        assert session.status == "running"
        (alert,) = watch.alerts
        assert seen == [alert]
        assert (alert.rule_id, alert.severity) == ("non_finite_values", "critical")
        assert alert.step == 200
        assert not watch.halted
        wait(lambda: stored(session))
    events = quark.EventLogger(session).read(event_type="alert_raised")
    assert [(event.severity, event.step) for event in events] == [("critical", 200)]
    assert events[0].payload["alert_id"] == alert.id
    assert events[0].payload["first_step"] == 200
    assert [item.alert_id for item in stored(session)] == [alert.id]
    assert watch.result.run_id == session.run_id


@pytest.mark.long
def test_a_healthy_run_raises_nothing(tmp_path):
    with start(tmp_path) as session, quark.monitor(session, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        learn(metrics, 100)
        wait(lambda: watch.result is not None)
        learn(metrics, 300, first=100)
    assert watch.alerts == ()
    assert stored(session) == ()
    assert len(watch.result.health_scores) == 5


def test_readers_of_the_analyzer_are_not_disturbed(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        engine = quark.AnalyzerEngine(session)
        with quark.monitor(session, **FAST):
            learn(metrics)
            break_down(metrics, 200)
            wait(lambda: stored(session))
            assert engine.read_alerts() == ()
            found = engine.analyze()
        rules = [alert.rule_id for alert in engine.read_alerts()]
        assert rules == [alert.rule_id for alert in found.alerts]
        assert rules.count("non_finite_values") == 1
        assert stored(session)


def test_each_row_is_seen_once_and_as_it_is_stored(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session, batch_size=7)
        learn(metrics, 500)
        watch = quark.monitor(session, **FAST)
        learn(metrics, 500, first=500)
        for step in range(50):
            metrics.log_many({"train/a": float(step), "val/b": -float(step)}, step=step)
        for epoch in range(30):
            metrics.log("val/loss", 1.0 / (epoch + 1), epoch=epoch)
        metrics.log("train/loss", 9.0, step=3)  # out of order
        watch.close()
        seen, kept = watch._feed.load(ended=False), open_analysis(session).load()
        assert set(seen.metrics) == set(kept.metrics)
        for key, curve in kept.metrics.items():
            mine = seen.metrics[key]
            assert mine.unit == curve.unit
            assert mine.step.tolist() == curve.step.tolist()
            assert mine.value.tolist() == curve.value.tolist()
        assert seen.newest_us == kept.newest_us


def test_a_resumed_run_is_seen_from_its_beginning_without_what_it_hides(tmp_path):
    with start(tmp_path) as session:
        learn(quark.MetricsLogger(session), 100)
    run = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, reopen=True, from_step=50)
    with run, quark.monitor(run, **FAST) as watch:
        learn(quark.MetricsLogger(run), 50, first=50)
    steps = watch._feed.load(ended=True).metrics["train/loss"].step
    assert steps.tolist() == list(range(100))


def test_what_overflows_the_queue_is_read_from_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr("quark.analysis.monitor_state._WAITING_BYTES", 100)
    with start(tmp_path) as session, quark.monitor(session, min_interval_s=0.2) as watch:
        metrics = quark.MetricsLogger(session, batch_size=10)
        for first in range(0, 400, 50):
            learn(metrics, 50, first)
            session.flush("journaled")
    assert len(watch._feed.load(ended=True).metrics["train/loss"]) == 400


def test_a_log_call_is_halted_once_and_its_record_is_not_accepted(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        watch = quark.monitor(session, halt_on="critical", **FAST)
        learn(metrics)
        with pytest.raises(quark.TrainingHalted, match="not finite") as caught:
            log_until_halted(metrics, 200)
        assert caught.value.alert in watch.alerts
        assert isinstance(caught.value, QuarkError)
        assert watch.halted
        broken = metrics.columns(metric_key="train/loss")["step"].tolist()
        last = broken[-1]
        record = metrics.log("train/loss", 1.0, step=last + 1)
        metrics.flush()
        assert metrics.columns()["step"].tolist() == [*broken, last + 1]
        assert record.step == last + 1
        # Sequences have no gap, so nothing counts as lost.
        sequences = metrics.columns()["sequence"].tolist()
        assert sequences == list(range(len(sequences)))
    assert session.report_delivery().complete


CALLS = {
    "log_many": lambda w: w["metrics"].log_many({"a": 1.0}, step=1),
    "event": lambda w: w["events"].log("checkpoint_saved"),
    "session.add_log": lambda w: w["session"].add_log("text"),
    "write": lambda w: w["session"].write([w["record"]]),
    "log_batch": lambda w: w["batches"].log_batch(1.0, step=1),
    "start_step": lambda w: w["telemetry"].start_step(1),
    "store": lambda w: w["artifacts"].store("json", "a", {"b": 1}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_writer_meets_the_halt(tmp_path, name):
    with broken_run(tmp_path, halt_on="critical") as (session, metrics, _):
        writers = {
            "session": session,
            "metrics": metrics,
            "events": quark.EventLogger(session),
            "batches": quark.DataDiagnostics(session),
            "telemetry": quark.SystemTelemetry(session),
            "artifacts": quark.ArtifactStore(session),
            "record": RECORD_TYPES["event"](None, "", 0, 0, 0, 0, "text", "info"),
        }
        with pytest.raises(quark.TrainingHalted):
            CALLS[name](writers)
        CALLS[name](writers)
        for writer in list(writers.values())[1:-1]:
            writer.close()


def test_the_thread_of_on_alert_may_log_and_is_not_halted(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        answers = []

        def note(alert):
            answers.append(session.add_log(f"seen: {alert.title}"))

        watch = quark.monitor(session, halt_on="critical", on_alert=note, **FAST)
        learn(metrics)
        break_down(metrics, 200)
        wait(lambda: answers)
        with pytest.raises(quark.TrainingHalted):
            metrics.log("train/loss", 1.0, step=201)
        assert watch.halted


def test_of_many_threads_that_log_one_is_halted(tmp_path):
    halted, others = [], []
    with broken_run(tmp_path, halt_on="critical") as (_, metrics, _):
        barrier = threading.Barrier(8)

        def work(number):
            barrier.wait()
            for step in range(200):
                try:
                    metrics.log(f"other/{number}", 1.0, step=step)
                except quark.TrainingHalted as error:
                    halted.append(error)
                except Exception as error:
                    others.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert others == []
        assert len(halted) == 1


@pytest.mark.long
def test_a_session_that_is_left_by_the_halt_has_failed(tmp_path):
    with pytest.raises(quark.TrainingHalted), start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        quark.monitor(session, halt_on="critical", **FAST)
        learn(metrics)
        log_until_halted(metrics, 200)
    assert session.status == "failed"
    assert quark.open_run(session.run_id, tmp_path).status == "failed"
    events = quark.EventLogger(session).read(event_type="runtime_error")
    assert events[0].payload["exception_type"] == "TrainingHalted"
    assert not monitor_threads()


def test_whoever_catches_the_halt_decides_how_the_run_ends(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        quark.monitor(session, halt_on="error", **FAST)
        learn(metrics)
        with pytest.raises(quark.TrainingHalted):
            log_until_halted(metrics, 200)
        session.end_run("interrupted")
    assert session.status == "interrupted"


def test_a_halt_that_nobody_met_is_taken_back_by_the_end(tmp_path):
    with broken_run(tmp_path, halt_on="critical") as (_, metrics, watch):
        watch.close()
        metrics.log("train/loss", 1.0, step=201)
    with pytest.raises(InvalidRunStateError, match="ended"):
        metrics.log("train/loss", 1.0, step=202)


def test_a_run_that_has_ended_says_so_and_not_that_it_is_halted(tmp_path):
    with broken_run(tmp_path, halt_on="critical") as (session, metrics, _):
        pass
    assert session.status == "completed"
    with pytest.raises(InvalidRunStateError, match="ended"):
        metrics.log("train/loss", 1.0, step=201)


def test_without_a_threshold_nothing_halts(tmp_path):
    with broken_run(tmp_path) as (_, metrics, watch):
        metrics.log("train/loss", math.nan, step=201)
        assert not watch.halted


def test_the_halt_can_be_sent_to_another_process(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        quark.monitor(session, halt_on="critical", **FAST)
        learn(metrics)
        with pytest.raises(quark.TrainingHalted) as caught:
            log_until_halted(metrics, 200)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.alert == caught.value.alert


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()])
def test_what_on_alert_raises_is_logged_once_and_goes_nowhere(tmp_path, caplog, error):
    calls = []

    def fail(alert):
        calls.append(alert)
        raise error

    with start(tmp_path) as session, quark.monitor(session, on_alert=fail, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        learn(metrics)
        break_down(metrics, 200)
        wait(lambda: calls)
        quark.MetricsLogger(session).log("val/loss", math.inf, step=201)
        assert watch.alerts
    assert sum("on_alert failed" in record.message for record in caplog.records) == 1


def test_what_a_short_run_has_is_found_at_its_end(tmp_path):
    seen = []
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        watch = quark.monitor(session, on_alert=seen.append, min_interval_s=60)
        learn(metrics, 50)
        break_down(metrics, 50)
    assert [alert.rule_id for alert in seen] == [alert.rule_id for alert in watch.alerts]
    assert "non_finite_values" in [alert.rule_id for alert in seen]
    events = [event.event_type for event in quark.EventLogger(session).read()]
    assert events.index("alert_raised") < events.index("run_ended")
    assert stored(session)


def test_on_alert_may_end_the_monitor_and_the_run(tmp_path):
    session = start(tmp_path)
    metrics = quark.MetricsLogger(session)
    failures = []

    def end(_):
        try:
            session.end_run("interrupted")
        except Exception as error:
            failures.append(error)

    quark.monitor(session, on_alert=end, **FAST)
    learn(metrics)
    break_down(metrics, 200)
    wait(lambda: session.status == "interrupted")
    wait(lambda: not monitor_threads())
    assert failures == []


def test_a_slow_on_alert_does_not_hold_up_the_end_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("quark.analysis.monitor._LAST_LOOK_S", 0.2)
    held, release = threading.Event(), threading.Event()

    def hang(_):
        held.set()
        release.wait(120)

    session = start(tmp_path)
    metrics = quark.MetricsLogger(session)
    quark.monitor(session, on_alert=hang, **FAST)
    learn(metrics)
    break_down(metrics, 200)
    assert held.wait(60)
    session.end_run()
    release.set()
    assert session.status == "completed"
    assert "takes too long" in caplog.text


def test_an_epoch_counts_where_there_are_no_steps(tmp_path):
    with start(tmp_path) as session, quark.monitor(session, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        for epoch in range(20):
            metrics.log("train/loss", 1.0 / (epoch + 1), epoch=epoch)
        wait(lambda: watch.result is not None)
        first = watch.result
        metrics.log("train/loss", 0.04, epoch=20)
        wait(lambda: watch.result is not first)


def test_nothing_is_looked_at_before_the_steps_have_passed(tmp_path, monkeypatch):
    asked, is_due = [], TrainingMonitor._is_due
    monkeypatch.setattr(
        TrainingMonitor, "_is_due", lambda self, now: asked.append(now) or is_due(self, now)
    )
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        learn(metrics, 10)
        watch = quark.monitor(session, every_n_steps=100, min_interval_s=0.02)
        wait(lambda: watch.result is not None)
        first = watch.result
        learn(metrics, 50, first=10)
        session.flush("journaled")
        before = len(asked)
        wait(lambda: len(asked) > before + 3)
        assert watch.result is first
        learn(metrics, 60, first=60)
        wait(lambda: watch.result is not first)


def test_a_step_counter_that_starts_again_is_followed(tmp_path):
    with start(tmp_path) as session, quark.monitor(session, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        metrics.log("a/loss", 1.0, step=1000)
        wait(lambda: watch.result is not None)
        first = watch.result
        metrics.log("b/loss", 1.0, step=0)
        wait(lambda: watch.result is not first)


def test_a_failing_look_does_not_end_the_watch(tmp_path, monkeypatch, caplog):
    from quark.analysis import monitor as module

    original, failures = module.analyze_run, []

    def fail_at_first(*args, **options):
        if len(failures) < 2:
            failures.append(1)
            raise RuntimeError("a bug")
        return original(*args, **options)

    monkeypatch.setattr(module, "analyze_run", fail_at_first)
    with start(tmp_path) as session, quark.monitor(session, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        steps = itertools.count(0, 20)
        wait(lambda: (metrics.log("train/loss", 1.0, step=next(steps)), watch.result)[1])
    assert sum("a look failed" in record.message for record in caplog.records) == 1


def test_looks_that_take_long_are_spaced_out_and_told_once(tmp_path, monkeypatch, caplog):
    from quark.analysis import monitor as module

    monkeypatch.setattr(module, "_SLOW_S", 0.05)
    monkeypatch.setattr(module, "_SHARE", 0.0001)
    with start(tmp_path) as session, quark.monitor(session, **FAST) as watch:
        metrics = quark.MetricsLogger(session)
        learn(metrics)
        wait(lambda: watch.result is not None)
        learn(metrics, 500, first=200)
    assert sum("checks run every" in record.message for record in caplog.records) == 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"every_n_steps": True}, "every_n_steps"),
        ({"every_n_steps": 1.5}, "every_n_steps"),
        ({"on_alert": "print"}, "on_alert"),
        ({"halt_on": "warning"}, "halt_on"),
        ({"halt_on": True}, "halt_on"),
        ({"halt_on": ["error"]}, "halt_on"),
        ({"config": {}}, "config"),
        ({"config": quark.AnalyzerEngineConfig(rules=("no_such",))}, "rules"),
        ({"min_interval_s": 0}, "min_interval_s"),
        ({"min_interval_s": math.nan}, "min_interval_s"),
        ({"min_interval_s": "1"}, "min_interval_s"),
    ],
)
def test_a_bad_argument_is_named(tmp_path, arguments, named):
    with start(tmp_path) as session:
        with pytest.raises(SchemaValidationError, match=named):
            quark.monitor(session, **arguments)
        with pytest.raises(SchemaValidationError, match="session"):
            quark.monitor("run")


def test_only_the_chosen_rules_are_asked(tmp_path):
    config = quark.AnalyzerEngineConfig(rules=("divergence",))
    with start(tmp_path) as session, quark.monitor(session, config=config, **FAST) as watch:
        break_down(quark.MetricsLogger(session), 1)
    assert list(watch.result.verdicts) == ["divergence"]


def test_a_run_that_is_over_or_only_read_has_no_monitor(tmp_path):
    with start(tmp_path) as session:
        pass
    with pytest.raises(InvalidRunStateError, match=r"monitor: .*ended"):
        quark.monitor(session)
    with pytest.raises(InvalidRunStateError, match=r"monitor: .*reading only"):
        quark.monitor(quark.open_run(session.run_id, tmp_path))


def test_a_run_has_one_monitor_at_a_time(tmp_path):
    with start(tmp_path) as session:
        first = quark.monitor(session)
        with pytest.raises(InvalidRunStateError, match="already has a monitor"):
            quark.monitor(session)
        first.close()
        first.close()
        quark.monitor(session).close()


def test_a_later_monitor_keeps_what_an_earlier_one_has_stored(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for first in (0, 300):
            with quark.monitor(session, **FAST) as watch:
                learn(metrics, first=first)
                break_down(metrics, first + 200)
                wait(lambda watch=watch: watch.alerts)
            assert watch.alerts
        assert len(stored(session)) >= 2


def test_where_nothing_is_kept_it_does_nothing_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with start(tmp_path, backends="none") as session:
        with quark.monitor(session, halt_on="critical") as watch:
            learn(quark.MetricsLogger(session), 10)
        assert "the run stores nothing" in watch.refusal
        assert watch.alerts == ()
        assert watch.result is None
        assert not monitor_threads()
    assert [r.levelname for r in caplog.records if "monitor" in r.message] == ["WARNING"]


def test_on_another_rank_it_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("QUARK_RUN_ID", "abcdefabcdefabcd")
    with start(tmp_path) as session, quark.monitor(session) as watch:
        assert "rank 1" in watch.refusal
        assert not monitor_threads()


def test_a_context_of_an_open_run_has_the_same_monitor(tmp_path):
    with start(tmp_path) as session:
        with quark.monitor(session.context, **FAST) as watch:
            break_down(quark.MetricsLogger(session), 3)
        assert watch.alerts
        with pytest.raises(TypeError, match="process"):
            pickle.dumps(watch)


@pytest.mark.long
@pytest.mark.skipif(NO_FORK, reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_monitor_and_no_halt(tmp_path):
    with broken_run(tmp_path, halt_on="critical") as (session, metrics, watch):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                metrics.log("child/loss", 1.0, step=1)  # the halt is the parent's
                watch.close()
                assert not monitor_threads()
                try:
                    quark.monitor(session.context)
                except InvalidRunStateError as error:
                    code = 0 if "forked" in str(error) else 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with pytest.raises(quark.TrainingHalted):
            metrics.log("train/loss", 1.0, step=201)


@pytest.mark.long
@pytest.mark.skipif(NO_FORK, reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_a_forked_worker_logs_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("quark.analysis.monitor._OTHERS_S", 0.1)
    with start(tmp_path) as session, quark.monitor(session, **FAST) as watch:
        quark.MetricsLogger(session).log("train/loss", 1.0, step=0)
        seen, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                metrics = quark.MetricsLogger(session.context)
                learn(metrics, 100)
                break_down(metrics, 100)
                metrics.flush()
                os.read(seen, 1)
            finally:
                os._exit(0)
        try:
            wait(lambda: watch.alerts)
        finally:
            os.write(tell, b"x")
            os.waitpid(pid, 0)
    assert watch.alerts[0].rule_id == "non_finite_values"


SCRIPT = """
import math, sys, time, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
print(session.run_id, flush=True)
metrics = quark.MetricsLogger(session)
watch = quark.monitor(session, every_n_steps=10, min_interval_s=0.02, **{options})
{body}
"""


def run_script(path, body, options="{}", **popen):
    code = SCRIPT.replace("{options}", options).replace("{body}", body)
    return subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=280,
        **popen,
    )


@pytest.mark.long
def test_a_script_that_closes_nothing_ends_and_has_its_alert(tmp_path):
    body = "for step in range(50): metrics.log('train/loss', 1 / (step + 1), step=step)\n"
    done = run_script(tmp_path, body + "metrics.log('train/loss', math.nan, step=50)")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    run = quark.open_run(done.stdout.strip(), tmp_path)
    assert run.status == "completed"
    assert [alert.rule_id for alert in stored(run)][:1] == ["non_finite_values"]


@pytest.mark.long
def test_a_script_that_is_halted_has_failed(tmp_path):
    body = (
        "for step in range(10**6):\n"
        "    metrics.log('train/loss', math.nan if step > 50 else 1 / (step + 1), step=step)\n"
        "    time.sleep(0.001)"
    )
    done = run_script(tmp_path, body, options="{'halt_on': 'critical'}")
    assert done.returncode == 1
    assert "TrainingHalted: the monitor halts the training" in done.stderr
    assert quark.open_run(done.stdout.split()[0], tmp_path).status == "failed"


@pytest.mark.long
def test_a_hanging_on_alert_does_not_hang_the_interpreter(tmp_path):
    body = (
        "for step in range(50): metrics.log('train/loss', 1 / (step + 1), step=step)\n"
        "metrics.log('train/loss', math.nan, step=50)\n"
        "while not watch.alerts: time.sleep(0.01)\n"
    )
    options = "{'on_alert': lambda alert: time.sleep(10_000)}"
    # Half of it goes to the callback; the rest must do on a busy machine too.
    done = run_script(
        tmp_path, body, options, env={**os.environ, "QUARK_EXIT_TIMEOUT_SECONDS": "10"}
    )
    assert done.returncode == 0, done.stderr
    assert quark.open_run(done.stdout.split()[0], tmp_path).status == "completed"


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_in_the_middle_ends_the_run_as_interrupted(tmp_path):
    body = (
        "import os, signal, threading\n"
        "begun = threading.Event()\n"
        "def interrupt():\n"
        "    begun.wait()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "with session:\n"
        "    for step in range(10**7):\n"
        "        metrics.log('train/loss', 1 / (step + 1), step=step)\n"
        "        if step == 300: begun.set()\n"
        "        time.sleep(0.0005)"
    )
    done = run_script(tmp_path, body)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    assert quark.open_run(done.stdout.split()[0], tmp_path).status == "interrupted"
