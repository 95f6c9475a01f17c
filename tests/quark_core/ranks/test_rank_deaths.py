"""A rank that dies loses nothing; and the processes that ranks start log for their rank."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from kit.programs import run_code
from launching import clean_environment, slurm

import quark


def count(storage_dir, run_id):
    session = quark.open_run(run_id, storage_dir)
    return dict(Counter(r.rank for r in quark.MetricsLogger(session).read(metric_key="loss")))


@pytest.mark.parametrize("delivery", ["sync", pytest.param("start", marks=pytest.mark.long)])
def test_what_a_killed_rank_has_logged_is_delivered_later(tmp_path, start_ranks, runs_of, delivery):
    # It dies when the run has ended, so that rank 0 does not deliver it.
    variables = [slurm(rank, 2) for rank in range(2)]
    ranks, _ = start_ranks(tmp_path, variables, "ranks=all", "dies=1", "when=ended")
    (run_id,) = runs_of(tmp_path)
    assert [rank["rank"] for rank in ranks] == [0]
    if delivery == "sync":
        command = str(Path(sys.executable).with_name("quark"))
        subprocess.run([command, "sync", tmp_path], check=True, capture_output=True)
    else:
        with quark.start_run(project="next", storage_dir=tmp_path) as session:
            session.flush()
            deadline = time.monotonic() + 60
            while count(tmp_path, run_id).get(1, 0) < 11 and time.monotonic() < deadline:
                time.sleep(0.1)
    assert count(tmp_path, run_id) == {0: 20, 1: 11}
    assert quark.open_run(run_id, tmp_path).status == "completed"


@pytest.mark.long
def test_rank_zero_dies_and_the_others_records_are_kept(tmp_path, start_ranks, runs_of):
    variables = [slurm(rank, 3) for rank in range(3)]
    start_ranks(tmp_path, variables, "ranks=all", "dies=0", "sleep_ms=20")
    subprocess.run(
        [str(Path(sys.executable).with_name("quark")), "sync", tmp_path],
        check=True,
        capture_output=True,
    )
    ((state, _, points),) = runs_of(tmp_path).values()
    assert state == "lost"
    assert points == {(0, 0): 11, (0, 1): 20, (0, 2): 20}


WORKERS = """
import multiprocessing, os, sys
import quark

def work(context, name):
    with quark.MetricsLogger(context) as metrics:
        for step in range(10):
            metrics.log(name, 1.0, step=step)

if __name__ == "__main__":
    method = sys.argv[2]
    with quark.start_run(project="p", storage_dir=sys.argv[1], ranks="all") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("own", 1.0, step=0)
        if method == "fork":
            child = os.fork()
            if not child:
                metrics.log("forked", 1.0, step=1)
                metrics.close()
                os._exit(0)
            os.waitpid(child, 0)
        else:
            start = multiprocessing.get_context(method)
            worker = start.Process(target=work, args=(session.context, "spawned"))
            worker.start()
            worker.join()
            assert worker.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_of_a_rank_log_for_it(tmp_path, method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"there is no {method} here")
    script = tmp_path / "workers.py"
    script.write_text(textwrap.dedent(WORKERS))
    root = tmp_path / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(root), method],
            env=clean_environment(**slurm(rank, 2)),
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=280) for process in processes] == [0, 0]
    from quark_core.runs import backend_choice

    (stored,) = backend_choice.open_reader(root).list_runs()
    records = quark.MetricsLogger(quark.open_run(stored.run.id, root)).read()
    found = Counter((record.metric_key, record.rank) for record in records)
    key, points = ("forked", 1) if method == "fork" else ("spawned", 10)
    assert found == {("own", 0): 1, ("own", 1): 1, (key, 0): points, (key, 1): points}
    assert len({record.writer_id for record in records}) == 4


@pytest.mark.long
def test_a_signal_to_a_rank_that_joined_does_not_end_the_run(tmp_path):
    code = """
import os, pathlib, signal, sys, time, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1], ranks="all")
metrics = quark.MetricsLogger(session)
metrics.log("loss", 1.0, step=0)
folder = pathlib.Path(sys.argv[1])
if os.environ["SLURM_PROCID"] == "1":
    session.flush("stored")
    (folder / "signalled").touch()
    os.kill(os.getpid(), signal.SIGTERM)
while not (folder / "signalled").exists():
    time.sleep(0.02)
time.sleep(0.5)
session.end_run()
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], env=clean_environment(**slurm(rank, 2))
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=280) for process in processes] == [0, -15]
    from quark_core.runs import backend_choice

    (stored,) = backend_choice.open_reader(tmp_path).list_runs()
    assert stored.state == "completed"
    assert count(tmp_path, stored.run.id) == {0: 1, 1: 1}
    assert os.listdir(tmp_path / ".quark" / "launches")


@pytest.mark.long
def test_a_rank_that_joined_says_with_which_code_it_has_left(tmp_path):
    code = """
import os, sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1], ranks="all")
if os.environ["SLURM_PROCID"] == "1":
    sys.exit(3)
sys.stdin.read()
session.end_run()
"""
    script = tmp_path / "rank.py"
    script.write_text(code)
    leader, other = (
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            stdin=subprocess.PIPE,
            env=clean_environment(**slurm(rank, 2)),
        )
        for rank in range(2)
    )
    other.communicate(timeout=280)
    assert other.returncode == 3
    leader.communicate(timeout=280)
    assert leader.returncode == 0
    from quark_core.runs import backend_choice

    (stored,) = backend_choice.open_reader(tmp_path).list_runs()
    assert (stored.state, stored.exit_code) == ("completed", None)
    (left,) = quark.EventLogger(quark.open_run(stored.run.id, tmp_path)).read(
        event_type="rank_left"
    )
    ending = {"cause": "exit_status", "message": "exit status 3"}
    told = {"exit_code": 3, "ending": ending}
    assert (left.rank, left.status, left.payload) == (1, "interrupted", told)


ALONE = """
import logging, sys, quark
logging.basicConfig(level=logging.INFO, format="%(message)s")
session = quark.start_run(project="p", storage_dir=sys.argv[1], ranks="all")
metrics = quark.MetricsLogger(session)
for step in range(10):
    metrics.log("loss", 1.0, step=step)
session.end_run()
"""


@pytest.mark.long
def test_a_rank_whose_leader_never_came_waits_once_and_says_so(tmp_path):
    # An end that waits again would take this long, and the process would be killed.
    variables = {"QUARK_LAUNCH_TIMEOUT_SECONDS": "0.5", "QUARK_EXIT_TIMEOUT_SECONDS": "600"}
    done = run_code(ALONE, tmp_path, env=clean_environment(**slurm(1, 2), **variables))
    (told,) = [line for line in done.stderr.splitlines() if "has not started it within" in line]
    assert "its lead rank 0 has not started it within 0.5 s" in told
    (left,) = [line for line in done.stderr.splitlines() if "quark sync" in line]
    assert "waiting" in left
    with quark.start_run(project="p", storage_dir=tmp_path):
        pass
    assert len(list((tmp_path / ".quark").glob("runs/*/journal/*"))) == 1


LATE = """
import os, subprocess, sys, quark
lead = "import quark, sys; quark.start_run(project='p', storage_dir=sys.argv[1], ranks='all')"
session = quark.start_run(project="p", storage_dir=sys.argv[1], ranks="all")
metrics = quark.MetricsLogger(session)
for step in range(10):
    metrics.log("loss", 1.0, step=step)
environment = {**os.environ, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
subprocess.run([sys.executable, "-c", lead, sys.argv[1]], env=environment, check=True)
session.end_run()
"""


@pytest.mark.long
def test_a_leader_that_came_late_is_found_at_the_end(tmp_path):
    subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path)],
        env=clean_environment(**slurm(1, 2), QUARK_LAUNCH_TIMEOUT_SECONDS="0.2"),
        timeout=280,
        check=True,
    )
    from quark_core.runs import backend_choice

    (stored,) = backend_choice.open_reader(tmp_path).list_runs()
    assert count(tmp_path, stored.run.id) == {1: 10}
