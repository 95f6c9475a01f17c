"""Signals, exceptions and exit: nothing is lost, nothing hangs, and exit statuses stay."""

import signal

import pytest
from kit.programs import read_values, run_script, start_script

import quark
from quark_core.runs import recovery


@pytest.mark.long
def test_a_handler_that_was_there_is_called_and_the_run_goes_on(tmp_path):
    child = start_script(
        tmp_path,
        """
def save_checkpoint(number, frame):
    metrics.log("checkpoint", 1.0, step=0)
    print("saved", flush=True)
signal.signal(signal.SIGTERM, save_checkpoint)
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
metrics.log("m", 0.0, step=0)
print(session.run_id, flush=True)
time.sleep(0.2)
while not metrics.read(metric_key="checkpoint"):
    time.sleep(0.01)
session.end_run()
""",
    )
    run_id = child.stdout.readline().strip()
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=200)
    assert (out.strip(), child.returncode) == ("saved", 0), err
    assert quark.open_run(run_id, tmp_path).status == "completed"
    assert read_values(tmp_path, run_id, "checkpoint") == [1.0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("prepare", "environment", "returncode"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", {}, 0),
        ("", {"QUARK_SIGTERM_HANDLER": "0"}, -signal.SIGTERM),
    ],
    ids=["ignored", "opted out"],
)
def test_a_signal_that_is_ignored_or_opted_out_is_left_alone(
    tmp_path, prepare, environment, returncode
):
    child = start_script(
        tmp_path,
        f"""
{prepare}
before = signal.getsignal(signal.SIGTERM)
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    assert signal.getsignal(signal.SIGTERM) is before
    print("ready", flush=True)
    sys.stdin.readline()
""",
        **environment,
    )
    child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    child.communicate("go on\n", timeout=200)
    assert child.returncode == returncode


@pytest.mark.long
def test_a_run_that_is_started_in_another_thread_installs_no_handler(tmp_path):
    out, _ = run_script(
        tmp_path,
        """
def work():
    with quark.start_run(project="p", storage_dir=storage_dir):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        print("fine", flush=True)
thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
    )
    assert out.strip() == "fine"


@pytest.mark.long
def test_a_storm_of_signals_during_log_deadlocks_nothing_and_loses_nothing(tmp_path):
    out, _ = run_script(
        tmp_path,
        """
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
import itertools
counter = itertools.count()
def log_too(number, frame):
    count = next(counter)
    metrics.log("signal", float(count), step=count)
signal.signal(signal.SIGALRM, log_too)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for step in range(20000):
    metrics.log("m", float(step), step=step)
    if step % 2000 == 0:
        metrics.flush()
signal.setitimer(signal.ITIMER_REAL, 0)
session.end_run()
print(session.run_id, next(counter))
""",
    )
    run_id, count = out.split()
    assert read_values(tmp_path, run_id) == list(map(float, range(20000)))
    # A handler may itself be interrupted by the next signal, so only the order may differ.
    assert sorted(read_values(tmp_path, run_id, "signal")) == list(map(float, range(int(count))))
    assert int(count) > 10


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ending", "status", "returncode"),
    [
        ("raise ValueError('boom')", "failed", 1),
        ("raise KeyboardInterrupt", "interrupted", -signal.SIGINT),
        ("sys.excepthook = lambda *a: sys.stderr.write('mine'); raise ValueError", "failed", 1),
        ("sys.exit(3)", "interrupted", 3),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", "interrupted", -signal.SIGINT),
    ],
    ids=["exception", "interrupt", "foreign hook", "exit", "ctrl-c"],
)
def test_what_ends_a_script_ends_its_run(tmp_path, ending, status, returncode):
    body = f"""
session, metrics = begin()
log_steps(metrics, 1)
{ending}
"""
    out, errors = run_script(tmp_path, body, ends=returncode)
    assert quark.open_run(out.strip(), tmp_path).status == status
    assert read_values(tmp_path, out.strip()) == [0.0]
    # A hook that was there is called too.
    assert ("mine" in errors) is ("mine" in ending)


HANG = """
from quark_core.backends.registry import default_registry
from quark_core.testing.fakes import ScriptedBackend, define_scripted
stuck = define_scripted("stuck", ScriptedBackend(always="hang"))
default_registry()._definitions["stuck"] = stuck
session = quark.start_run(project="p", storage_dir=storage_dir, backends="stuck")
metrics = quark.MetricsLogger(session)
log_steps(metrics, 100)
print(session.run_id, flush=True)
"""


ENDING = """
wait = session.open_run.stream._wait_for_lanes
def tell(*arguments):
    print("ending", flush=True)
    wait(*arguments)
session.open_run.stream._wait_for_lanes = tell
session.end_run()
"""


@pytest.mark.long
def test_exit_is_bounded_and_says_in_one_line_what_is_left(tmp_path):
    out, err = run_script(tmp_path, HANG, QUARK_EXIT_TIMEOUT_SECONDS="0.5")
    (line,) = [line for line in err.splitlines() if "quark sync" in line]
    assert "stuck" in line
    assert str(tmp_path) in line
    assert read_values(tmp_path, out.strip()) == list(map(float, range(100)))
    (waiting,) = [lane for lane in recovery.survey(tmp_path) if lane.backend == "stuck"]
    assert waiting.waiting >= 100


@pytest.mark.long
def test_ctrl_c_at_the_end_leaves_at_once_and_loses_nothing(tmp_path):
    child = start_script(tmp_path, HANG + ENDING, QUARK_EXIT_TIMEOUT_SECONDS="600")
    run_id = child.stdout.readline().strip()
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=200)
    recovery.sync(tmp_path)
    assert read_values(tmp_path, run_id) == list(map(float, range(100)))


@pytest.mark.long
def test_logging_from_odd_places(tmp_path):
    out, err = run_script(
        tmp_path,
        """
import atexit, logging
session, metrics = begin()
class Finalized:
    def __del__(self):
        metrics.log("del", 1.0, step=0)
class Handler(logging.Handler):
    def emit(self, record):
        metrics.log("logging", 1.0, step=0)
logging.getLogger("user").addHandler(Handler())
logging.getLogger("user").warning("x")
Finalized()
cycle = Finalized(); cycle.me = cycle; del cycle
import gc; gc.collect()
atexit.register(lambda: metrics.log("atexit", 1.0, step=0))
""",
    )
    assert "Traceback" not in err
    run_id = out.strip()
    assert read_values(tmp_path, run_id, "del") == [1.0, 1.0]
    assert read_values(tmp_path, run_id, "logging") == [1.0]
    assert read_values(tmp_path, run_id, "atexit") == [1.0]


@pytest.mark.long
def test_a_daemon_thread_that_logs_at_exit_prints_nothing(tmp_path):
    out, err = run_script(
        tmp_path,
        """
quiet = threading.Event()
def work(log):
    while True:
        log()
        quiet.wait(0.0001)
session, metrics = begin()
events = quark.EventLogger(session)
calls = [
    lambda: metrics.log("m", 1.0, step=0),
    lambda: metrics.log_many({"n": 1.0}, step=0),
    lambda: events.log("e"),
    lambda: session.add_log("text"),
    lambda: session.add_tag("t"),
    lambda: session.write([quark.MetricRecord.make("w", 1.0, step=0)]),
]
threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls]
for thread in threads:
    thread.start()
# Comes after the end of the runs: by then each thread has met it.
def wait_for_threads():
    for thread in threads:
        thread.join(30)
    print(any(thread.is_alive() for thread in threads), flush=True)
from quark_core.system.exit_status import call_last
call_last(wait_for_threads)
while not metrics.read(metric_key="w"):
    time.sleep(0.01)
""",
    )
    run_id, alive = out.split()
    assert alive == "False"
    assert "Traceback" not in err
    assert quark.open_run(run_id, tmp_path).status == "completed"
