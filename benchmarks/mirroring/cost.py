"""What five backends cost the training thread, beside one, and beside MLflow and W&B themselves."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

import quark
from mirroring.backends import list_backends

METRICS = 8
STEP_S = 0.002
_DRAIN_TIMEOUT_S = 120.0
Log = Callable[[dict[str, float], int], object]


class Turn(NamedTuple):
    """Seconds a step of one turn, means; and how long it took to drain.

    Attributes:
        step_s: A step.
        own_s: Of that, what the training thread did not wait for a core, which is
            what others on the machine take: what it computed and what it waited
            for, such as the interpreter.
        call_s: The call that logs.
        thread_cpu_s: Processor time of the training thread.
        process_cpu_s: That of its whole process, the draining included.
        children_cpu_s: That of the mirrors' own processes.
        drained_s: From the end of the last step to the last acknowledgement.
    """

    step_s: float
    own_s: float
    call_s: float
    thread_cpu_s: float
    process_cpu_s: float
    children_cpu_s: float
    drained_s: float


@dataclass(slots=True)
class Mode:
    """One way to log, and what its turns took.

    Attributes:
        log: Logs the metrics of a step.
        drain: Waits until everything that was logged is delivered.
        share: How many of a turn's steps it takes.
        steps_s: Time of each step.
        calls_s: Of that, of the call that logs.
        turns: What each turn took.
    """

    log: Log
    drain: Callable[[], None] = lambda: None
    share: float = 1.0
    steps_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


def measure_cost(uri: str, *, quick: bool) -> list[dict[str, Any]]:
    """Steps of about 2 ms that log 8 metrics, in turns of each mode; one row per mode."""
    rounds, steps = (2, 100) if quick else (24, 300)
    compute = make_compute()
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        modes = _open_modes(stack, uri)
        for mode in modes.values():
            # Libraries are imported, processes started and runs made before anything counts.
            _take_turn(mode, compute, 50 if quick else 200)
        for mode in modes.values():
            mode.steps_s.clear()
            mode.calls_s.clear()
            mode.turns.clear()
        for _ in range(rounds):
            for mode in modes.values():
                _take_turn(mode, compute, steps)
    return [_sum_up(name, mode, modes) for name, mode in modes.items()]


def make_compute() -> Callable[[], object]:
    """A real step of training that takes about `STEP_S` on one thread."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    for width in range(64, 2048, 32):
        compute = _make_step(width)
        taken = []
        for _ in range(40):
            begin = time.perf_counter()
            compute()
            taken.append(time.perf_counter() - begin)
        # The quickest are those that nobody else disturbed.
        if sorted(taken)[4] >= STEP_S:
            break
    return compute


def _make_step(width: int) -> Callable[[], object]:
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(64, 64), torch.randint(2, (64,))

    def compute() -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return optimizer.step()

    return compute


def _open_modes(stack: ExitStack, uri: str) -> dict[str, Mode]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    one = stack.enter_context(quark.start_run(project="one", storage_dir=folder / "one"))
    five = stack.enter_context(
        quark.start_run(project="five", storage_dir=folder / "five", backends=list_backends(uri))
    )
    return {
        "no logging": Mode(lambda _values, _step: None),
        "embedded": _make_mode(one),
        "five backends": _make_mode(five),
        "embedded again": _make_mode(one),
        "mlflow.log_metrics": stack.enter_context(_open_mlflow(uri)),
        "wandb.log, offline": stack.enter_context(_open_wandb(folder)),
    }


def _make_mode(session: quark.TrainingSession) -> Mode:
    log_many = quark.MetricsLogger(session).log_many

    def drain() -> None:
        stream = session.open_run.stream
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while any(lane.waiting for lane in session.report_delivery().lanes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"these do not come: {session.report_delivery()}")
            for lane in stream._lanes:
                lane.nudge()
            time.sleep(0.02)

    return Mode(lambda values, step: log_many(values, step=step), drain)


@contextmanager
def _open_mlflow(uri: str) -> Iterator[Mode]:
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("directly")
    with mlflow.start_run():
        # A request a step: a fifth of the steps takes as long as those of the others.
        yield Mode(lambda values, step: mlflow.log_metrics(values, step=step), share=0.2)


@contextmanager
def _open_wandb(folder: Path) -> Iterator[Mode]:
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run: Any = wandb.init(project="directly", mode="offline", dir=str(folder))
    try:
        yield Mode(lambda values, step: run.log(values, step=step))
    finally:
        run.finish()


def _take_turn(mode: Mode, compute: Callable[[], object], steps: int) -> None:
    """Train for so many steps, then wait for the delivery, so that no turn pays for another's."""
    clock, log, steps = time.perf_counter, mode.log, int(steps * mode.share)
    first = len(mode.steps_s)
    process = psutil.Process()
    children = _measure_children(process)
    process_s, thread_s, waited_s = time.process_time(), time.thread_time(), _measure_waiting()
    taken, calls = [], []
    for step in range(first, first + steps):
        values = {f"train/metric{index}": step / (index + 7) for index in range(METRICS)}
        begin = clock()
        compute()
        computed = clock()
        log(values, step)
        end = clock()
        taken.append(end - begin)
        calls.append(end - computed)
    thread_s, waited_s = time.thread_time() - thread_s, _measure_waiting() - waited_s
    began = clock()
    mode.drain()
    drained_s = clock() - began
    process_s = time.process_time() - process_s
    children_s = _measure_children(process) - children
    mode.steps_s += taken
    mode.calls_s += calls
    whole_s = sum(taken)
    parts = (whole_s, whole_s - waited_s, sum(calls), thread_s, process_s, children_s)
    mode.turns.append(Turn(*(part / steps for part in parts), drained_s))


def _measure_waiting() -> float:
    """How long this thread has been ready and without a core; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _measure_children(process: psutil.Process) -> float:
    total = 0.0
    for child in process.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _sum_up(name: str, mode: Mode, modes: dict[str, Mode]) -> dict[str, Any]:
    base = modes["embedded"].turns

    def compare(field_name: str) -> list[float]:
        pairs = zip(mode.turns, base, strict=True)
        return sorted(getattr(turn, field_name) / getattr(one, field_name) for turn, one in pairs)

    def middle(field_name: str) -> float:
        return float(median(getattr(turn, field_name) for turn in mode.turns))

    ordered, calls = sorted(mode.steps_s), sorted(mode.calls_s)
    count = len(ordered)
    own = compare("own_s")
    return {
        "logging by": name,
        "step ms p50": 1000 * ordered[count // 2],
        "p99": 1000 * ordered[int(count * 0.99)],
        "mean": 1000 * middle("step_s"),
        "own": 1000 * middle("own_s"),
        "mean / embedded": median(compare("step_s")),
        "own / embedded": median(own),
        "quartiles": f"{own[len(own) // 4]:.3f} {own[3 * len(own) // 4]:.3f}",
        "call us p50": 1e6 * calls[count // 2],
        "call p99": 1e6 * calls[int(count * 0.99)],
        "call mean": 1e6 * middle("call_s"),
        "thread CPU ms": 1000 * middle("thread_cpu_s"),
        "thread / embedded": median(compare("thread_cpu_s")),
        "process CPU ms": 1000 * middle("process_cpu_s"),
        "children CPU ms": 1000 * middle("children_cpu_s"),
        "drain s": middle("drained_s"),
    }
