"""`quark sweep`: a sweep from the command line, its agent, and what goes wrong with it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stopped_processes import stop_between_writes

import quark
from quark.cli.sweep_agent import AgentChoices, SweepAgent
from quark.sweeps.sweep_store import StoreLink

_SCRIPT = str(Path(sys.executable).with_name("quark"))
_DEADLINE_S = 120

TRAIN = """
import argparse, os, sys, time
import quark
from quark.cli.sweep_agent import AgentChoices, SweepAgent
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--layers", type=int)
config = vars(parser.parse_args())
with quark.start_run(project="digits", config=config) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(int(os.environ.get("STEPS", "3"))):
        metrics.log("val/acc", config["layers"] - config["lr"], step=step)
        session.flush("stored")
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
"""


@pytest.fixture
def train(tmp_path):
    """A script that trains with two parameters."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture
def new(tmp_path, invoke):
    """Opens a sweep by the command."""

    def call(name="lr-search", *arguments, trials=2):
        done = invoke(
            "sweep", "new", name, "-p", "digits", "-d", tmp_path, "--trials", trials,
            "--set", "lr=log:1e-4:1e-1", "--set", "layers=int:1:4",
            "--metric", "val/acc", "--mode", "max", *arguments,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        return name

    return call


@pytest.fixture
def begin(tmp_path):
    """Starts an agent in a process of its own; it is killed where a test leaves it."""
    begun = []

    def call(*arguments, **environment):
        process = subprocess.Popen(
            [_SCRIPT, "sweep", "run", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    yield call
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def work(begin):
    """Runs an agent to its end: (status, stdout, stderr)."""

    def call(*arguments, **environment):
        process = begin(*arguments, **environment)
        stdout, stderr = process.communicate(timeout=_DEADLINE_S)
        return process.returncode, stdout, stderr

    return call


@pytest.fixture
def list_trials(tmp_path):
    """The trials of the one sweep there is."""

    def call():
        link = StoreLink(tmp_path, read_only=True)
        try:
            (sweep,) = link.store.list_sweeps()
            return link.store.list_trials(sweep.id)
        finally:
            link.close()

    return call


def wait_for(condition, timeout_s=_DEADLINE_S):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
    return found


def test_a_script_runs_for_each_trial_with_its_parameters(new, work, train, list_trials, tmp_path):
    new()
    status, _, stderr = work("lr-search", "--", sys.executable, train)
    assert status == 0, stderr
    trials = list_trials()
    assert [trial.state for trial in trials] == ["completed"] * 2
    for trial in trials:
        expected = trial.parameters["layers"] - trial.parameters["lr"]
        assert trial.values == pytest.approx((expected,))
    runs = quark.search_runs(storage_dir=tmp_path)
    assert {run.run_id for run in runs} == {trial.run_id for trial in trials}
    assert {run.stored.run.groups for run in runs} == {("sweeps/lr-search",)}
    assert "lr-search: 2 completed; best: trial" in stderr


@pytest.mark.long
def test_placeholders_and_variables_have_the_parameters(new, work, list_trials, tmp_path):
    new(trials=1)
    script = tmp_path / "print.py"
    script.write_text(
        "import json, os, sys, quark\n"
        "print(json.dumps([sys.argv[1:], json.loads(os.environ['QUARK_PARAMETERS']),"
        " os.environ['QUARK_TRIAL'], 'QUARK_RUN_ID' in os.environ, os.environ.get('RANK')]))\n"
        "with quark.start_run(project='digits'): pass\n"
    )
    status, stdout, stderr = work(
        "lr-search", "--", sys.executable, script, "rate={lr}", "{not a name}",
        QUARK_RUN_ID="taken", RANK="3", WORLD_SIZE="8",
    )  # fmt: skip
    assert status == 0, stderr
    words, parameters, claim, has_run_id, rank = json.loads(stdout)
    (trial,) = list_trials()
    assert parameters == trial.parameters
    assert words == [f"rate={parameters['lr']}", "{not a name}"]
    assert claim == f"{trial.sweep_id}/0/1"
    assert not has_run_id
    assert rank is None


@pytest.mark.long
def test_several_run_at_once_and_each_line_says_of_which(new, work, train, list_trials, tmp_path):
    new(trials=4)
    say = tmp_path / "say.py"
    say.write_text(f"print('hello')\nimport runpy, sys\nrunpy.run_path({str(train)!r})\n")
    status, stdout, stderr = work("lr-search", "--workers", 2, "--", sys.executable, say)
    assert status == 0, stderr
    assert sorted(stdout.splitlines()) == [f"{number}| hello" for number in range(4)]
    assert [trial.state for trial in list_trials()] == ["completed"] * 4


def test_a_script_that_never_begins_a_run_is_settled_with_its_reason(
    new, work, list_trials, tmp_path
):
    new("lr-search", "--max-failures", 2, trials=3)
    script = tmp_path / "broken.py"
    script.write_text("import nothing_of_this_name\n")
    status, _, stderr = work("lr-search", "--", sys.executable, script)
    assert status == 2
    assert "3 trials in a row ended before they started a run" in stderr
    first, second, *_ = list_trials()
    assert first.state == "broken"
    assert first.failures == 2
    for trial in (first, second):
        assert "ended with status 1 before it started a run: ModuleNotFoundError" in trial.reason
    assert second.state == "waiting"


def test_a_script_that_ends_well_without_a_run_is_not_tried_again(new, work, list_trials, tmp_path):
    new(trials=1)
    script = tmp_path / "idle.py"
    script.write_text("pass\n")
    status, _, _ = work("lr-search", "--", sys.executable, script)
    assert status == 3
    (trial,) = list_trials()
    assert (trial.state, trial.token) == ("failed", 1)
    assert trial.reason == "ended with status 0 before it started a run"


@pytest.mark.long
def test_a_run_that_is_killed_is_a_failure_and_tried_again(new, work, list_trials, train, tmp_path):
    new(trials=1)
    killed = tmp_path / "killed.py"
    killed.write_text(
        "import os, pathlib, runpy, signal, sys\n"
        "mark = pathlib.Path('mark')\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    import quark\n"
        "    session = quark.start_run(project='digits')\n"
        "    quark.MetricsLogger(session).log('val/acc', 1.0, step=0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"runpy.run_path({str(train)!r})\n"
    )
    status, _, stderr = work("lr-search", "--", sys.executable, killed)
    assert status == 0, stderr
    assert "failed, will be retried: was ended by SIGKILL" in stderr
    (trial,) = list_trials()
    assert (trial.state, trial.token, trial.failures, trial.losses) == ("completed", 2, 1, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "status"), [("SIGINT", 130), pytest.param("SIGTERM", 143, marks=pytest.mark.long)]
)
def test_a_signal_gives_the_trial_back_and_somebody_goes_on_with_it(
    new, begin, work, train, list_trials, name, status
):
    new(trials=1)
    agent = begin("lr-search", "--", sys.executable, train, STEPS="600", PAUSE_S="0.1")
    wait_for(lambda: any(trial.run_id for trial in list_trials()))
    agent.send_signal(getattr(signal, name))
    _, stderr = agent.communicate(timeout=_DEADLINE_S)
    assert agent.returncode == status, stderr
    (trial,) = list_trials()
    assert trial.state == "suspended"
    status, _, stderr = work("lr-search", "--", sys.executable, train)
    assert status == 0, stderr
    (trial,) = list_trials()
    assert (trial.state, trial.token, trial.failures) == ("completed", 2, 0)


def test_a_trial_that_was_on_its_way_when_a_signal_came_is_given_back(tmp_path, monkeypatch):
    sweep = quark.sweep(
        "s", project="p", space={"lr": [0.1, 0.2]}, search="grid", metric="loss", mode="min",
        storage_dir=tmp_path,
    )  # fmt: skip
    claim = sweep.claim

    def claim_and_stay():
        claimed = claim()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # longer than the agent takes to see the signal
        return claimed

    monkeypatch.setattr(sweep, "claim", claim_and_stay)
    said = []
    choices = AgentChoices(command=("true",), storage_dir=tmp_path)
    assert SweepAgent(sweep, choices, said.append).run() == 128 + signal.SIGTERM
    first, second = sweep.trials()
    assert (first.state, first.reason, second.state) == (
        "suspended",
        "it was not started",
        "waiting",
    )
    assert said == []
    sweep.close()


def test_a_second_signal_kills_what_does_not_end(new, begin, list_trials, tmp_path):
    new(trials=1)
    script = tmp_path / "deaf.py"
    # A launcher's workers have sessions of their own, which no signal to the group reaches.
    script.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "pathlib.Path('pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )
    agent = begin("lr-search", "--", sys.executable, script)
    pids = wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    agent.send_signal(signal.SIGINT)
    assert "waiting for 1 trial to end; Ctrl-C again kills it" in wait_for_line(agent, "again")
    agent.send_signal(signal.SIGINT)
    agent.communicate(timeout=_DEADLINE_S)
    assert agent.returncode == 130
    (trial,) = list_trials()
    assert (trial.state, trial.failures) == ("suspended", 0)
    for pid in map(int, pids.split()):
        wait_for(lambda pid=pid: not is_running(pid))


def wait_for_line(process, text):
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said")


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.long
def test_a_trial_that_another_worker_has_got_is_ended_here(
    new, begin, list_trials, tmp_path, train
):
    new("lr-search", "--lease", 1.5, trials=1)
    script = tmp_path / "slow.py"
    script.write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(600)\n")
    agent = begin("lr-search", "--no-wait", "--", sys.executable, script)
    wait_for((tmp_path / "began").exists)
    stop_between_writes(agent.pid, tmp_path)
    sweep = quark.sweep("lr-search", storage_dir=tmp_path, lease_s=60)
    taken = wait_for(sweep.claim)
    os.kill(agent.pid, signal.SIGCONT)
    taken.complete([0.5])
    _, stderr = agent.communicate(timeout=_DEADLINE_S)
    sweep.close()
    assert "was claimed by another worker" in stderr
    (trial,) = list_trials()
    assert (trial.state, trial.values, trial.token) == ("completed", (0.5,), 2)


@pytest.mark.long
def test_a_value_that_no_command_can_be_given_fails_its_trial_alone(
    new, work, train, list_trials, tmp_path
):
    new(trials=1)
    sweep = quark.sweep("lr-search", storage_dir=tmp_path)
    sweep.add({"lr": "a\0b", "layers": 1}, {"lr": "$(touch owned)", "layers": 1})
    sweep.close()
    status, _, stderr = work(
        "lr-search", "--", "sh", "-c", f"{sys.executable} {train} --lr {{lr}} --layers {{layers}}"
    )
    assert status == 0, stderr
    states = {trial.parameters["lr"]: (trial.state, trial.reason) for trial in list_trials()}
    assert states["a\0b"][0] == "failed"
    assert "cannot be passed to a command" in states["a\0b"][1]
    assert "so a shell would interpret its value" in states["$(touch owned)"][1]
    assert sorted(state for state, _ in states.values()) == ["completed", "failed", "failed"]
    assert not (tmp_path / "owned").exists()


def test_pause_resume_and_cancel(new, invoke, work, train, list_trials, tmp_path):
    new()
    at = ("-d", tmp_path)
    assert "is paused" in invoke("sweep", "pause", "lr-search", *at).output
    status, _, stderr = work("lr-search", "--no-wait", "--", sys.executable, train)
    assert (status, list_trials()) == (0, []), stderr
    assert "is running again" in invoke("sweep", "resume", "lr-search", *at).output
    done = invoke("sweep", "cancel", "lr-search", "-y", *at)
    assert done.exit_code == 0, done.output
    assert "cancelled" in invoke("sweep", "show", "lr-search", *at).output
    again = invoke("sweep", "resume", "lr-search", *at)
    assert again.exit_code == 2
    assert "cancelled" in again.output


@pytest.mark.long
def test_broken_trials_are_tried_again_when_the_script_is_mended(
    new, invoke, work, train, list_trials, tmp_path
):
    good = train.read_text()
    train.write_text(good.replace("    for step", "    raise OSError('no disk')\n    for step"))
    name = new("lr-search", "--max-failures", "1")
    work(name, "--", sys.executable, train)
    assert [trial.state for trial in list_trials()] == ["broken"] * 2
    train.write_text(good)
    said = invoke("sweep", "retry", name, "-d", tmp_path)
    assert (said.exit_code, said.output) == (0, "Retrying trials: 0 as 2, 1 as 3.\n")
    work(name, "--", sys.executable, train)
    assert [trial.state for trial in list_trials()] == ["broken"] * 2 + ["completed"] * 2
    said = invoke("sweep", "retry", name, "-d", tmp_path)
    assert "has no broken trials to retry" in said.output
    said = invoke("sweep", "retry", name, "-d", tmp_path, "--trial", "3")
    assert said.exit_code == 2
    assert "trial 3 is completed" in said.output


def test_the_limit_and_what_is_left(new, work, train, list_trials):
    new(trials=3)
    status, _, stderr = work("lr-search", "-n", 1, "--", sys.executable, train)
    assert status == 0, stderr
    assert [t.state for t in list_trials()].count("completed") == 1


@pytest.mark.long
def test_a_sweep_is_shown_with_its_trials(new, invoke, work, train, tmp_path):
    new()
    work("lr-search", "--", sys.executable, train)
    for columns in (60, 160):
        shown = invoke("sweep", "show", "lr-search", "-d", tmp_path, columns=columns)
        assert shown.exit_code == 0, shown.output
        assert "trials with a result (2, best first)" in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= columns
        assert "done" in shown.stdout
    told = json.loads(invoke("sweep", "show", "lr-search", "-d", tmp_path, "--json").stdout)
    assert told["counts"] == {"completed": 2}
    assert len(told["trials"]) == 2
    (listed,) = json.loads(invoke("sweep", "show", "-d", tmp_path, "--json").stdout)
    assert listed["name"] == "lr-search"
    assert "lr-search" in invoke("sweep", "show", "-d", tmp_path).stdout


def test_the_same_sweep_again_is_that_one_and_another_one_is_refused(new, invoke, tmp_path):
    new()
    new()
    other = invoke(
        "sweep", "new", "lr-search", "-p", "digits", "-d", tmp_path,
        "--set", "lr=log:1e-4:1", "--metric", "val/acc", "--mode", "max",
    )  # fmt: skip
    assert other.exit_code == 2
    assert "lr" in other.output


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "lr-serach", "--", "python"), "Did you mean 'lr-search'?"),
        (("run", "lr-search"), "Pass the command to run for each trial after --"),
        (("run", "lr-search", "--", "no-such-program"), "'no-such-program' cannot be started"),
        (("run", "lr-search", "--", "./train.py"), "it is not executable. To run a script: python"),
        (("show", "other"), "no sweep 'other' in the store "),
        (("pause", "other"), "no sweep 'other' in the store "),
        (("run", "lr-search", "--", "python", "{laers}"), "Did you mean {layers}?"),
        (
            ("show", "lr-search", "-p", "another"),
            "no sweep 'lr-search' in project 'another' of the store ",
        ),
        (
            ("new", "x", "-p", "p", "--metric", "m"),
            "Pass the parameters with --set NAME=VALUES or --space FILE.",
        ),
        (("new", "x", "-p", "p", "--metric", "m", "--set", "lr"), "--set must be NAME=VALUES"),
        (
            ("new", "x", "-p", "p", "--metric", "m", "--set", "lr=log:0:1"),
            "--set lr: low must be above 0",
        ),
        (
            ("new", "x", "-p", "p", "--metric", "loss", "--set", "a=1,2", "--search", "nonsense"),
            "nonsense",
        ),
        (
            ("new", "x", "-p", "p", "--metric", "m", "--set", "a=1,2"),
            "--mode is required: pass 'min' or 'max'",
        ),
    ],
)
def test_what_is_wrong_is_told_by_name(
    new, train, quark_command, list_trials, tmp_path, words, said
):
    new(trials=1)
    command, *rest = [str(train) if word == "./train.py" else word for word in words]
    done = quark_command("sweep", command, "-d", tmp_path, *rest)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert all(trial.state in ("waiting", "suspended") for trial in list_trials())


@pytest.mark.sampled
@pytest.mark.skipif(shutil.which("unshare") is None, reason="mounts a file system of its own")
@pytest.mark.parametrize(
    "words", [("pause", "lr-search"), ("run", "lr-search", "--", "true")], ids=lambda w: w[0]
)
def test_a_store_on_a_disk_that_is_read_only_is_told(new, tmp_path, words):
    new()
    # Of root's too: the file system itself refuses.
    mounted = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True)
    if probe.returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mounted} && exec "$@"', "sh",
         _SCRIPT, "sweep", words[0], "-d", str(tmp_path), *words[1:]],
        capture_output=True, text=True, cwd=tmp_path, timeout=_DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_sweeps_are_completed(new, tmp_path):
    from quark.cli.completion import complete_sweeps
    from quark.cli.sweep import show

    new("lr-search")
    new("$(evil)")
    context = show.make_context("show", ["-d", str(tmp_path)])
    assert [item.value for item in complete_sweeps(context, None, "")] == ["lr-search"]
    assert complete_sweeps(context, None, "other") == []
