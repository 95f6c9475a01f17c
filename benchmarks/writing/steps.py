"""What telemetry and batch diagnostics add to a training step."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import print_rows
from instrumenting.devices import find_wait

import quark

STEPS_MS = (1.0, 50.0)
BATCH = 32
GOALS = {
    ("telemetry, cadence 1", 1.0): 0.03,
    ("telemetry, cadence 10", 1.0): 0.01,
    ("log_batch", 1.0): 0.03,
}


Around = Callable[[int, Callable[[], None]], None]
"""Runs a step of a number, with what is measured around it."""


def make_step(step_ms: float, device: str) -> Callable[[], None]:
    """A step of about so much computing, as training does it: mostly outside of Python."""
    wait = find_wait(device)
    size = 96 if device == "cpu" else 1024
    matrix = torch.randn(size, size, device=device)
    out = torch.empty(size, size, device=device)
    torch.mm(matrix, matrix, out=out)
    wait()
    begin, count = time.perf_counter(), 200
    for _ in range(count):
        torch.mm(matrix, matrix, out=out)
    wait()
    each_s = (time.perf_counter() - begin) / count
    repeats = max(1, round(step_ms / 1000 / each_s))

    def step() -> None:
        for _ in range(repeats):
            torch.mm(matrix, matrix, out=out)
        wait()

    return step


def run_block(
    steps: int,
    first: int,
    work: Callable[[], None],
    around: Around,
) -> list[float]:
    """Seconds of each step of a block."""
    clock = time.perf_counter
    taken = []
    for number in range(first, first + steps):
        begin = clock()
        around(number, work)
        taken.append(clock() - begin)
    return taken


def measure_steps(*, quick: bool, device: str = "cpu") -> list[dict[str, Any]]:
    """Blocks with and without, in turns; ratios of the medians, and the calls' own time."""
    torch.set_num_threads(1)
    rows = []
    for step_ms in STEPS_MS:
        work = make_step(step_ms, device)
        blocks = 4 if quick else 12
        steps = max(10, int((100 if quick else 600) / step_ms))
        for name, open_writer in WRITERS.items():
            rows.append(_measure(name, open_writer, work, step_ms, blocks, steps, device))
    print_rows(
        f"Added time per step on {device} "
        f"(load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
        rows,
    )
    return rows


def _measure(
    name: str,
    open_writer: Any,
    work: Callable[[], None],
    step_ms: float,
    blocks: int,
    steps: int,
    device: str,
) -> dict[str, Any]:
    bare: list[float] = []
    logged: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        quark.start_run(project="steps", storage_dir=folder) as session,
    ):
        around, close = open_writer(session, device)
        run_block(20, 0, work, around)
        first = 20
        for _ in range(blocks):
            bare += run_block(steps, first, work, _plain)
            logged += run_block(steps, first, work, around)
            first += steps
        own_us = _measure_alone(around, first)
        close()
    before, after = statistics.median(bare), statistics.median(logged)
    mean_before, mean_after = _trim(bare), _trim(logged)
    return {
        "what": name,
        "step ms": round(before * 1000, 3),
        "added, by medians": after / before - 1,
        "added, by means": mean_after / mean_before - 1,
        "calls alone us": own_us,
        "calls alone / step": own_us / 1e6 / before,
        "goal": GOALS.get((name, step_ms)),
    }


def _trim(taken: list[float]) -> float:
    """Mean without the slowest twentieth, which others on the machine make."""
    kept = sorted(taken)[: max(1, len(taken) * 19 // 20)]
    return statistics.fmean(kept)


def _measure_alone(around: Around, first: int) -> float:
    """Microseconds of the calls around an empty step, paced as steps of 1 ms are."""
    taken = []
    for number in range(first, first + 1000):
        begin = time.perf_counter()
        around(number, _nothing)
        taken.append(time.perf_counter() - begin)
        time.sleep(0.0005)
    return _trim(taken) * 1e6


def _plain(_number: int, work: Callable[[], None]) -> None:
    work()


def _nothing() -> None:
    return None


def _open_telemetry(cadence: int, **rates: Any) -> Any:
    def open_writer(session: Any, device: str) -> Any:
        config = quark.SystemTelemetryConfig(sample_every_n_steps=cadence, device=device)
        telemetry = quark.SystemTelemetry(session, config=config, **rates)

        def around(number: int, work: Callable[[], None]) -> None:
            with telemetry.start_step(number, epoch=0) as scope:
                scope.mark_data_ready()
                work()

        return around, telemetry.close

    return open_writer


def _open_batches(session: Any, device: str) -> Any:
    diagnostics = quark.DataDiagnostics(session)
    labels = torch.randint(0, 10, (BATCH,), device=device)
    lengths = torch.randint(1, 512, (BATCH,), device=device)
    ids = list(range(BATCH))

    def around(number: int, work: Callable[[], None]) -> None:
        work()
        diagnostics.log_batch(
            0.5, step=number, epoch=0, labels=labels, sample_ids=ids, sequence_lengths=lengths
        )

    return around, diagnostics.close


WRITERS = {
    "telemetry, cadence 1": _open_telemetry(1),
    "telemetry, cadence 10": _open_telemetry(10),
    "telemetry with rates, cadence 1": _open_telemetry(
        1, tokens_per_step=4096, flops_per_token=6e6, peak_flops_per_s=1e12
    ),
    "log_batch": _open_batches,
}
