"""`QuarkTracker` in a real Accelerator."""

import subprocess
import sys

import pytest
from frameworks import ask_to_stop, import_or_skip

import quark
from quark_core.errors import SchemaValidationError

# What Accelerate and its libraries warn of is theirs.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
accelerate, module = import_or_skip("accelerate", "quark_torch.integrations.accelerate")


@pytest.fixture(autouse=True)
def one_accelerator():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(tracker, steps=5, fails_at=None):
    accelerator = accelerate.Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("ignored", config={"lr": 0.1, "name": "adam"})
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step in range(steps):
            if step == fails_at:
                raise ValueError("planted")
            loss = model(torch.ones(2, 4)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"train/loss": loss, "flag": True, "text": "not a number"}, step=step)
    finally:
        accelerator.end_training()


def test_a_training_is_logged_by_its_steps(tmp_path, runs, read, caplog):
    train(module.QuarkTracker("vision", storage_dir=tmp_path))
    (run,) = runs()
    assert (run.status, run.project_name) == ("completed", "vision")
    assert [step for step, _ in read(run, "train/loss")] == list(range(5))
    assert read(run, "flag")[0] == (0, 1.0)
    assert read(run, "text") == []
    assert caplog.text.count("text is str, not a number") == 1
    values = run.open_run.reader.load_run(run.run_id).config.values
    assert values == {"lr": 0.1, "name": "adam"}


def test_a_training_that_raises_has_failed(tmp_path, runs, read):
    with pytest.raises(ValueError, match="planted"):
        train(module.QuarkTracker("vision", storage_dir=tmp_path), fails_at=2)
    (run,) = runs()
    assert run.status == "failed"
    assert [step for step, _ in read(run, "train/loss")] == [0, 1]


def test_a_run_is_resumed_with_its_config(tmp_path, runs, read):
    with pytest.raises(ValueError, match="planted"):
        train(module.QuarkTracker("vision", storage_dir=tmp_path, config={"seed": 7}), fails_at=2)
    (run,) = runs()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    train(module.QuarkTracker(run_id=run.run_id, storage_dir=tmp_path, from_step=2))
    (run,) = runs()
    assert (run.status, run.context.run.attempt) == ("completed", 1)
    assert [step for step, _ in read(run, "train/loss")] == [0, 1, 0, 1, 2, 3, 4]
    config = run.open_run.reader.load_run(run.run_id).config.values
    assert config == {"seed": 7, "lr": 0.1, "name": "adam"}


def test_calls_without_a_step_count_on(tmp_path, runs, read):
    tracker = module.QuarkTracker("vision", storage_dir=tmp_path)
    accelerate.PartialState(cpu=True)
    for value in (1.0, 2.0):
        tracker.log({"m": value})
    tracker.log({"m": 3.0}, step=10)
    tracker.log({"m": 4.0})
    tracker.finish()
    (run,) = runs()
    assert read(run, "m") == [(0, 1.0), (1, 2.0), (10, 3.0), (11, 4.0)]


def test_a_session_and_its_arguments_are_not_both_given(tmp_path):
    with (
        quark.start_run(project="mine", storage_dir=tmp_path) as session,
        pytest.raises(SchemaValidationError, match="project cannot be set"),
    ):
        module.QuarkTracker("vision", session=session)


def test_a_loop_that_asks_ends_where_somebody_wants_it(tmp_path, runs):
    tracker = module.QuarkTracker("vision", storage_dir=tmp_path)
    accelerator = accelerate.Accelerator(log_with=tracker, cpu=True)
    assert not tracker.should_stop(accelerator)
    accelerator.init_trackers("ignored")
    accelerator.log({"loss": 1.0}, step=0)
    assert not tracker.should_stop(accelerator)
    ask_to_stop(tracker.tracker)
    assert tracker.should_stop(accelerator)
    accelerator.end_training()
    (run,) = runs()
    assert run.status == "completed"


def test_a_tracker_that_is_told_to_raise_ends_its_run_as_interrupted(tmp_path, runs, read):
    tracker = module.QuarkTracker("vision", storage_dir=tmp_path, on_stop="raise")
    accelerator = accelerate.Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("ignored")
    accelerator.log({"loss": 1.0}, step=0)
    ask_to_stop(tracker.tracker)
    with pytest.raises(quark.StopRequested):
        try:
            accelerator.log({"loss": 1.0}, step=1)
        finally:
            accelerator.end_training()
    (run,) = runs()
    assert run.status == "interrupted"
    assert read(run, "loss") == [(0, 1.0)]


TWO_PROCESSES = """
import sys
import accelerate
import quark
from quark_core.runs.open_run import StopLookout
from quark_torch.integrations.accelerate import QuarkTracker

tracker = QuarkTracker("vision", storage_dir=sys.argv[1])
accelerator = accelerate.Accelerator(log_with=tracker, cpu=True)
accelerator.init_trackers("ignored")
for step in range(1000):
    accelerator.log({"loss": 1.0}, step=step)
    if step == 5 and accelerator.is_main_process:
        quark.stop_run(tracker.tracker, reason="enough")
        lookout = StopLookout(tracker.tracker.open_run)
        lookout.look()
        if lookout._thread is not None:  # the session's own has not heard of it before
            lookout._thread.join()
    if tracker.should_stop(accelerator):
        break
accelerator.end_training()
# In one piece, so that the lines of two processes do not mix.
sys.stdout.write(f"process {accelerator.process_index} stopped at {step}\\n")
sys.stdout.flush()
"""


def test_all_processes_stop_at_one_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # The first step at which they agree: each 20th call is one.
    assert sorted(line for line in done.stdout.splitlines() if "stopped" in line) == [
        "process 0 stopped at 19",
        "process 1 stopped at 19",
    ]
