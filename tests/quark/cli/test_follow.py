"""`quark follow` in real terminals and pipes, of runs that go on meanwhile."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from terminals import DEADLINE_S, OWN, Terminal, Training

import quark
from quark.cli import follow_view
from quark.cli.follow import Waiting, _look_until_end
from quark.cli.follow_view import FollowedRun
from quark.page.routes.page_source import open_source
from quark_core.errors import StoreUnavailableError
from quark_core.runs.run_ids import shorten_run_id

HOSTILE = "E\x1b]0;owned\x07\x1b[2J\x9b31m\rok\nline\u202ex"
SLOWLY = ("--interval", 3600)  # nothing but what is awaited has it look again
QUICKLY = ("--interval", 0.05)


@pytest.fixture
def train():
    """Starts runs that do what they are told."""
    started = []

    def start(*arguments, **named):
        started.append(Training(*arguments, **named))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def open_terminal():
    """Opens terminals with `quark follow` in them."""
    opened = []

    def start(*words, **named):
        opened.append(Terminal("follow", *words, **named))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@contextlib.contextmanager
def piping(*words, **environment):
    """`quark follow` with its output in a pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quark", "follow", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process, text):
    """Lines of a process up to the one that has a text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} did not come: {lines}, {process.stderr.read()}")


def test_a_run_is_followed_until_its_end(tmp_path, train, open_terminal):
    run = train(tmp_path, name="first", config={"max_steps": 100})
    run.log(0, **{"train/loss": 2.0})
    terminal = open_terminal("first", "-d", tmp_path, *QUICKLY)
    terminal.wait_for(lambda it: any("train/loss  2" in line for line in it.screen))
    run.log(10, **{"train/loss": 1.25, "val/loss": 1.5})
    run.tell("say", "half way")
    terminal.wait_for(lambda it: any("train/loss  1.25" in line for line in it.screen))
    screen = terminal.wait_for(
        lambda it: it.screen if any("half way" in line for line in it.screen) else None
    )
    assert any("step 10 of 100 (10 %)" in line for line in screen)
    assert any("val/loss  1.5" in line for line in screen)
    run.end()
    assert terminal.wait_for_end() == 0
    assert terminal.is_whole()
    last = terminal.rest.strip().splitlines()
    assert last[-1].startswith(f"run {run.run_id[:8]} is completed after ")


def test_the_screen_is_drawn_anew_for_another_size(tmp_path, train, open_terminal):
    run = train(tmp_path)
    for step in range(5):
        run.log(step, **{f"m{number}": float(step) for number in range(6)})
    terminal = open_terminal(run.run_id, "-d", tmp_path, *SLOWLY, columns=80, rows=24)
    terminal.wait_for(lambda it: "\x1b[24;1H" in it.text and len(it.screen) == 24)
    assert {len(line) for line in terminal.screen} == {80}
    for columns, rows in ((130, 40), (60, 12), (20, 4), (5, 2), (200, 3)):
        terminal.resize(columns, rows)
        screen = terminal.wait_for(
            lambda it, rows=rows, columns=columns: (
                it.screen
                if len(it.screen) == rows and {len(line) for line in it.screen} == {columns}
                else None
            )
        )
        assert "vision".startswith(screen[0].rstrip("… ")[:6])
    terminal.press(b"\x03")
    assert terminal.wait_for_end() == 130
    assert terminal.is_whole()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_who_ends_it_gets_a_whole_terminal(number, tmp_path, train, open_terminal):
    run = train(tmp_path)
    run.log(3, **{"train/loss": 0.5})
    terminal = open_terminal(run.run_id, "-d", tmp_path, *SLOWLY)
    terminal.wait_for_text("train/loss")
    assert not terminal.is_whole()
    if number == signal.SIGINT:
        terminal.press(b"\x03")
    else:
        terminal.process.send_signal(number)
    assert terminal.wait_for_end() == 128 + number
    assert terminal.is_whole()
    if number == signal.SIGINT:
        assert f"run {run.run_id[:8]} is running, at step 3" in terminal.rest
    assert "Traceback" not in terminal.text


def test_ctrl_z_gives_the_terminal_back_meanwhile(tmp_path, train, open_terminal):
    run = train(tmp_path)
    run.log(3, **{"train/loss": 0.5})
    terminal = open_terminal(run.run_id, "-d", tmp_path, *SLOWLY)
    terminal.wait_for_text("train/loss")
    # The group is orphaned, which a system does not stop: the screen is left and entered again.
    terminal.press(b"\x1a")
    terminal.wait_for(lambda it: it.text.count("\x1b[?1049h") == 2)
    assert terminal.text.count("\x1b[?1049l") == 1
    terminal.press(b"\x03")
    assert terminal.wait_for_end() == 130
    assert terminal.is_whole()


def test_ctrl_z_while_a_look_is_drawn_waits_for_its_end():
    suspended = []
    with Waiting(lambda: suspended.append("now")) as waiting:
        os.kill(os.getpid(), signal.SIGTSTP)
        assert suspended == []
        assert waiting.wait(3600)
        assert suspended == ["now"]
        assert not waiting.wait(0)


def test_a_run_whose_process_is_killed_is_lost(tmp_path, train, open_terminal):
    run = train(tmp_path)
    run.log(7, **{"train/loss": 0.5})
    terminal = open_terminal(run.run_id, "-d", tmp_path, *QUICKLY)
    terminal.wait_for_text("train/loss")
    run.process.kill()
    assert terminal.wait_for_end() == 3, terminal.text
    assert terminal.is_whole()
    assert f"run {run.run_id[:8]} is lost" in terminal.rest


@pytest.mark.long
def test_exit_statuses_say_how_runs_have_ended(tmp_path, train, log_run, invoke):
    log_run(tmp_path, "good", values={"loss": [1.0, 0.5]})
    log_run(tmp_path, "bad", values={"loss": [1.0]}, status="failed")
    log_run(tmp_path, "broken", values={"loss": [1.0]}, status="interrupted")
    run = train(tmp_path)
    run.log(0, loss=1.0)
    expected = {"good": 0, "bad": 3, "broken": 3, run.run_id: 0}
    for name, status in expected.items():
        done = invoke("follow", name, "-d", tmp_path, "--once", "--no-analyze")
        assert (done.exit_code, done.stderr) == (status, "")
        assert shorten_run_id(name) in done.stdout
    with piping(run.run_id, "-d", tmp_path, *QUICKLY) as process:
        read_until(process, "loss 1")
        run.end(failing="it broke")
        lines = process.stdout.read().splitlines()
        assert process.wait(DEADLINE_S) == 3
    assert lines[-1].startswith(f"run {run.run_id[:8]} is failed (ValueError: it broke) after ")


def test_a_pipe_gets_lines(tmp_path, train):
    run = train(tmp_path, config={"max_steps": 50})
    run.log(0, **{"train/loss": 2.0, "lr": 0.1})
    with piping(run.run_id, "-d", tmp_path, "-m", "train/loss", *QUICKLY) as process:
        first = read_until(process, "train/loss 2")[-1]
        assert re.match(r"\d\d:\d\d:\d\d step 0 of 50 \(0 %\)", first)
        run.log(25, **{"train/loss": float("nan"), "lr": 0.1})
        run.tell("say", "a line")
        lines = read_until(process, "train/loss not finite")
        assert "step 25 of 50 (50 %)" in lines[-1]
        run.end()
        rest = process.stdout.read()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""
    said = "".join(lines) + rest
    assert "info: a line" in said
    assert "lr" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize("term", ["dumb", pytest.param("unknown", marks=pytest.mark.long)])
def test_a_dumb_terminal_gets_lines_too(term, tmp_path, log_run, open_terminal):
    log_run(tmp_path, "r1", values={"train/loss": [1.0, 0.5]})
    terminal = open_terminal("r1", "-d", tmp_path, TERM=term)
    assert terminal.wait_for_end() == 0
    assert "train/loss 0.5" in terminal.text
    assert "\x1b" not in terminal.text


def test_it_ends_when_nobody_reads_any_more(tmp_path, train):
    """Also while nothing comes that it could fail to write."""
    run = train(tmp_path)
    run.log(0, loss=1.0)
    with piping(run.run_id, "-d", tmp_path, *SLOWLY, "--no-analyze") as process:
        read_until(process, "loss 1")
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 141
        assert process.stderr.read() == ""
        process.stdout = None  # it is closed


@pytest.mark.long
def test_each_look_is_a_json_object_with_json(tmp_path, train):
    run = train(tmp_path)
    run.log(0, loss=1.0)
    with piping(run.run_id, "-d", tmp_path, "--json", *QUICKLY) as process:
        first = json.loads(process.stdout.readline())
        assert first["metrics"]["loss"]["last"] == 1.0
        run.log(1, loss=float("inf"))
        while json.loads(process.stdout.readline())["progress"]["step"] != 1:
            pass
        run.end()
        last = json.loads(process.stdout.read().splitlines()[-1])
    assert (last["state"], last["metrics"]["loss"]["non_finite"]) == ("completed", 1)
    assert (last["run_id"], last["metrics"]["loss"]["last"]) == (run.run_id, None)


def test_what_is_wrong_comes_as_it_is_found(tmp_path, start, invoke):
    """By a monitor in the run: what it stores is shown."""
    session = start(tmp_path, "r1")
    monitor = quark.monitor(session, every_n_steps=10, min_interval_s=0.01)
    metrics = quark.MetricsLogger(session)
    for step in range(60):
        metrics.log("train/loss", float("nan") if step > 40 else 1.0 / (step + 1), step=step)
    monitor.close()
    session.end_run("failed")
    done = invoke("follow", "r1", "-d", tmp_path, "--no-analyze")
    assert done.exit_code == 3
    assert re.search(r"alert, critical: .* \(train/loss\) since step 41", done.stdout)
    assert "alert_raised" not in done.stdout
    shown = invoke("follow", "r1", "-d", tmp_path, "--once").stdout
    assert re.findall(r"^critical: (.*) since", shown, re.M) == [
        "The run failed",
        "Values are not finite (train/loss)",
    ]


@pytest.mark.long
def test_names_and_log_lines_steer_no_terminal(tmp_path, train, open_terminal):
    run = train(tmp_path, name=HOSTILE)
    run.log(0, **{HOSTILE: 1.0, "loss": 0.5})
    run.tell("say", HOSTILE)
    terminal = open_terminal(run.run_id, "-d", tmp_path, *SLOWLY, columns=150)
    terminal.wait_for_text("owned")
    terminal.press(b"\x03")
    terminal.wait_for_end()
    left = OWN.sub("", terminal.text)
    assert not re.search(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", left)
    assert not re.search(r"(?m)^(ok|line)", left)
    # Not one clear of the screen among what it has written.
    assert "\x1b[2J" not in terminal.text


def test_ascii_is_enough(tmp_path, log_run, open_terminal):
    log_run(tmp_path, "r1", values={"loss": list(np.linspace(1, 0, 50))})
    terminal = open_terminal("r1", "-d", tmp_path, "--once", PYTHONIOENCODING="ascii")
    assert terminal.wait_for_end() == 0
    assert terminal.text.isascii()
    assert "?" not in terminal.text
    assert re.search(r"[.':]{5}", terminal.text)


def test_a_look_reads_what_came_and_nothing_twice(tmp_path, start, monkeypatch):
    """Every point once, whatever the looks fall on; the same as of a run that is read whole."""
    session = start(tmp_path, "r1")
    metrics = quark.MetricsLogger(session)
    source = open_source(tmp_path)
    followed = FollowedRun(source, "r1", names=["loss"], analyze=False)
    assert followed.look().curves == {}
    wanted = []
    for step in range(40):
        wanted.append(1.0 / (step + 1))
        metrics.log("loss", wanted[-1], step=step)
        if step % 7 == 0:
            session.flush("stored")
            look = followed.look()
            assert look.curves["loss"].y.tolist() == wanted
            assert look.curves["loss"].x.tolist() == list(range(step + 1))
    session.flush("stored")
    followed.look()
    reads = []
    monkeypatch.setattr(source, "summarize", lambda run_id: reads.append(run_id))
    # A heartbeat, or what the run notes of its machine, may come at any moment.
    monkeypatch.setattr(follow_view, "read_mark", lambda *_: followed._known.mark)
    for _ in range(5):
        assert followed.look().curves["loss"].y.tolist() == wanted
    assert reads == []
    session.end_run()
    assert followed.close()
    source.close()


def test_a_later_attempt_takes_back_what_it_does_again(tmp_path, start):
    session = start(tmp_path, "r1")
    metrics = quark.MetricsLogger(session)
    for step in range(10):
        metrics.log("loss", float(step), step=step)
    session.end_run("failed")
    source = open_source(tmp_path)
    followed = FollowedRun(source, "r1", analyze=False)
    assert followed.look().curves["loss"].y.tolist() == [float(step) for step in range(10)]
    again = quark.TrainingSession.resume_run(run_id="r1", storage_dir=tmp_path, from_step=5)
    quark.MetricsLogger(again).log("loss", 50.0, step=5)
    again.flush("stored")
    look = followed.look()
    assert look.summary.state == "running"
    assert look.curves["loss"].y.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 50.0]
    again.end_run()
    assert followed.close()
    source.close()


def test_other_tools_runs_are_followed_too(tmp_path, log_run, invoke):
    log_run(tmp_path, "r1", values={"loss": [1.0, 0.25]}, backends=[f"csv:{tmp_path / 'out'}"])
    done = invoke("follow", "r1", "--once", "--backend", f"csv:{tmp_path / 'out'}")
    assert done.exit_code == 0
    assert "loss  0.25" in done.stdout


@pytest.mark.parametrize(
    "read",
    ["read_mark", "_read_whole", "read_changes", "find_main_metric", "describe_progress", "raised"],
)
def test_a_look_that_fails_costs_neither_points_nor_events(read, tmp_path, start, monkeypatch):
    session = start(tmp_path, "r1")
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)

    def log(step, *keys):
        for key in keys:
            metrics.log(key, float(step), step=step)
        events.log("came", step=step)
        session.flush("stored")

    def list_steps(look):
        return [event.step for event in look.new_events if event.event_type == "came"]

    log(0, "loss")
    source = open_source(tmp_path)
    followed = FollowedRun(source, "r1", analyze=False)
    assert list_steps(followed.look()) == [0]
    log(1, "loss", "acc")  # of a metric that is new, so that curves are read anew

    def fail(*arguments, **named):
        raise StoreUnavailableError("out of reach")

    with monkeypatch.context() as broken:
        if read == "raised":
            broken.setattr(type(source.reader), "read_outputs", fail)
        else:
            broken.setattr(follow_view, read, fail)
        with pytest.raises(StoreUnavailableError):
            followed.look()
        log(2, "loss")
        with pytest.raises(StoreUnavailableError):
            followed.look()
    log(3, "acc")
    look = followed.look()
    assert {key: points.y.tolist() for key, points in look.curves.items()} == {
        "loss": [0.0, 1.0, 2.0],
        "acc": [1.0, 3.0],
    }
    assert list_steps(look) == [1, 2, 3]
    assert followed.look().new_events == []
    session.end_run()
    assert followed.close()
    source.close()


def test_the_last_look_is_told_also_where_the_one_after_the_analysis_fails(
    tmp_path, log_run, monkeypatch
):
    log_run(tmp_path, "r1", values={"loss": [1.0]})
    source = open_source(tmp_path)
    followed = FollowedRun(source, "r1")
    looks, shown = [followed.look(), StoreUnavailableError("out of reach")], []

    def look():
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    looks[0] = last = replace(looks[0], computing=True)
    monkeypatch.setattr(followed, "look", look)
    ended = _look_until_end(followed, None, 0, lambda *told: shown.append(told), repeats=False)
    assert ended is last
    assert shown == [(last, None)]
    assert followed.close(DEADLINE_S)
    source.close()


def test_an_outage_of_the_store_is_waited_out(tmp_path, log_run, monkeypatch):
    log_run(tmp_path, "r1", values={"loss": [1.0]})
    source = open_source(tmp_path)
    followed = FollowedRun(source, "r1", analyze=False)
    good = followed.look()
    running = replace(good.summary, stored=replace(good.summary.stored, state="running"))
    looks = [replace(good, summary=running), *[StoreUnavailableError("out of reach")] * 3, good]
    shown = []

    class Reading:
        def look(self):
            found = looks.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    class Waiting:
        def wait(self, timeout_s):
            return False

    def show(look, trouble):
        shown.append(trouble)

    ended = _look_until_end(Reading(), Waiting(), 0, show, repeats=False)
    assert ended is good
    assert shown == [None, "out of reach", None]
    source.close()
