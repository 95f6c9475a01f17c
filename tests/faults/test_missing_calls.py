"""What only some systems have may be missing: the main job runs without each of it."""

import pytest
from kit.programs import run_code

import quark

PROGRAM = """
import {module}
{hide}
import sys, quark
with quark.start_run(project="p", storage_dir=sys.argv[1], backends="csv") as session:
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    for step in range(200):
        metrics.log("loss", 1.0 / (step + 1), step=step)
    events.log("checkpoint_saved")
    session.flush("durable")
    metrics.flush()
    assert len(metrics.read()) == 200
assert session.report_delivery().complete
print(session.run_id)
"""

CALLS = [
    ("os", "fdatasync"),
    ("os", "posix_fallocate"),
    ("os", "fork"),
    ("os", "getuid"),
    ("os", "sched_getaffinity"),
    ("os", "getloadavg"),
    ("os", "sysconf"),
    ("os", "pread"),
    ("os", "pwrite"),
    ("signal", "SIGKILL"),
    ("signal", "SIGUSR1"),
    ("signal", "SIGHUP"),
    ("signal", "pthread_sigmask"),
    ("signal", "raise_signal"),
    ("socket", "AF_UNIX"),
    ("time", "clock_gettime"),
]


def run(tmp_path, program):
    done = run_code(program, tmp_path)
    assert "Traceback" not in done.stderr
    session = quark.open_run(done.stdout.strip(), tmp_path)
    assert session.status == "completed"
    found = quark.MetricsLogger(session).read()
    assert [record.step for record in found] == list(range(200))
    assert len((session.run_path / "csv" / "metrics_long.csv").read_text().splitlines()) == 201


@pytest.mark.sampled
@pytest.mark.parametrize(("module", "name"), CALLS)
def test_the_main_job_runs_without_a_call(tmp_path, module, name):
    hide = f"if hasattr({module}, {name!r}): del {module}.{name}"
    run(tmp_path, PROGRAM.format(module=module, hide=hide))


@pytest.mark.long
def test_the_main_job_runs_where_nothing_forks(tmp_path):
    # Together, as on Windows: the standard library takes one for the sign of the other.
    run(tmp_path, PROGRAM.format(module="os", hide="del os.fork, os.register_at_fork"))


@pytest.mark.long
def test_the_main_job_runs_without_any_of_them(tmp_path):
    modules = sorted({module for module, _ in CALLS})
    hide = "\n".join(
        f"if hasattr({module}, {name!r}): del {module}.{name}"
        for module, name in CALLS
        # The standard library itself does not load without this one.
        if name != "AF_UNIX"
    )
    hide += "\ndel os.register_at_fork"
    run(tmp_path, PROGRAM.format(module=", ".join(modules), hide=hide))


@pytest.mark.sampled
@pytest.mark.parametrize("module", ["fcntl", "resource", "pwd", "grp", "termios", "mmap"])
def test_the_main_job_runs_without_a_module(tmp_path, module):
    hide = f"import sys; sys.modules[{module!r}] = None"
    run(tmp_path, PROGRAM.format(module="os", hide=hide))
