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
from typing import Any

import psutil

import quark
from mirroring.backends import list_backends

__all__ = ["measure_cost", "print_cost"]

METRICS = 8
STEP_S = 0.002
_DRAIN_TIMEOUT_S = 120.0
Log = Callable[[dict[str, float], int], object]


@dataclass(slots=True)
class Mode:
    """One way to log, and what its turns took.

    Attributes:
        log: Logs the metrics of a step.
        drain: Waits until everything that was logged is delivered.
        share: How many of a turn's steps it takes.
        steps_s: Time of each step.
        calls_s: Of that, of the call that logs.
        turns: Of each turn: mean time of a step, of the call, CPU time of the
            training thread and of the whole process a step, and that of its
            children, in seconds; the time that it took to drain.
    """

    log: Log
    drain: Callable[[], None] = lambda: None
    share: float = 1.0
    steps_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    turns: list[tuple[float, float, float, float, float, float]] = field(default_factory=list)


def measure_cost(uri: str, *, quick: bool) -> list[dict[str, Any]]:
    """Steps of about 2 ms that log 8 metrics, in turns of each mode; one row per mode."""
    rounds, steps = (3, 200) if quick else (12, 700)
    compute = make_compute()
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        modes = _open_modes(stack, uri)
        for mode in modes.values():
            # Libraries are imported, processes started and runs made before anything counts.
            _take_turn(mode, compute, 200)
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
    process_s, thread_s = time.process_time(), time.thread_time()
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
    thread_s = time.thread_time() - thread_s
    began = clock()
    mode.drain()
    drained_s = clock() - began
    process_s = time.process_time() - process_s
    children_s = _measure_children(process) - children
    mode.steps_s += taken
    mode.calls_s += calls
    parts = (sum(taken), sum(calls), thread_s, process_s, children_s)
    mode.turns.append((*(part / steps for part in parts), drained_s))  # type: ignore[arg-type]


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
    base = modes["embedded"]
    ratios = [turn[0] / one[0] for turn, one in zip(mode.turns, base.turns, strict=True)]
    thread_ratios = [turn[2] / one[2] for turn, one in zip(mode.turns, base.turns, strict=True)]
    ordered, calls = sorted(mode.steps_s), sorted(mode.calls_s)
    count = len(ordered)
    columns = list(zip(*mode.turns, strict=True))
    return {
        "logging by": name,
        "step ms p50": 1000 * ordered[count // 2],
        "mean": 1000 * median(columns[0]),
        "p99": 1000 * ordered[int(count * 0.99)],
        "/ embedded": median(ratios),
        "from": min(ratios),
        "to": max(ratios),
        "call us p50": 1e6 * calls[count // 2],
        "call mean": 1e6 * median(columns[1]),
        "call p99": 1e6 * calls[int(count * 0.99)],
        "thread CPU ms": 1000 * median(columns[2]),
        "thread / embedded": median(thread_ratios),
        "process CPU ms": 1000 * median(columns[3]),
        "children CPU ms": 1000 * median(columns[4]),
        "drain s": median(columns[5]),
    }


def print_cost(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    head = list(rows[0])
    cells = [
        head,
        *([f"{v:,.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print("\nSteps that log 8 metrics, in turns; ratios are medians over the rounds\n")
    for line in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
