"""What the defaults cost, the machine's figures and the console, beside a run that has them off.

    python benchmarks/observers.py [steps|share|print ...] [--quick] [--json FILE]

Steps of 1 ms and of 50 ms, each of which logs a metric, as loops of one process in turns, one way
after the other: what another process took meanwhile hits all ways alike. The ratio of a turn is
that of the mean step to the mean step of both turns with all off around it; of all turns the
quartiles are printed, of the wall clock and of the processor time of the whole process, which
other processes touch less. With "a line" each step prints one as well, in all ways.

The share of a core is that of the thread that reads the machine, over minutes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from figures import make_parser, parse, write

import quark

OFF = {"system_metrics": False, "capture": None}
WAYS = {
    "off, again (A/A)": OFF,
    "the machine": {"system_metrics": True, "capture": None},
    "the console": {"system_metrics": False, "capture": "sys"},
    "both, as they come": {"system_metrics": True, "capture": "sys"},
}


def make_step(step_s: float) -> Callable[[], None]:
    """Work of the interpreter, and half of it without its lock, as in PyTorch."""

    def work(rounds: int) -> None:
        total = 0
        for number in range(rounds):
            total += number * number

    rounds = 1000
    while True:
        begin = time.perf_counter()
        work(rounds)
        if time.perf_counter() - begin > 0.002:
            break
        rounds *= 2
    begin = time.perf_counter()
    for _ in range(20):
        work(rounds)
    each_s = (time.perf_counter() - begin) / 20
    wanted = max(1, round(rounds * step_s / each_s))
    return lambda: work(wanted)


def run_turn(
    folder: str, step: Callable[[], None], steps: int, prints: bool, way: dict
) -> tuple[float, float]:
    """Mean seconds of a step of one run, by the clock and of the processor; without its start."""
    session = quark.start_run(project="bench", storage_dir=folder, **way)
    metrics = quark.MetricsLogger(session)
    for number in range(20):
        step()
        metrics.log("train/loss", 0.5, step=number)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for number in range(20, 20 + steps):
        step()
        metrics.log("train/loss", 0.5, step=number)
        if prints:
            print(f"step {number} loss {0.5 / number:.6f} lr 0.001 1234 it/s")
    taken_s = time.perf_counter() - begin
    session.flush()
    used_s = time.process_time() - begin_cpu
    session.end_run()
    return taken_s / steps, used_s / steps


def measure_steps(folder: str, step_s: float, turns: int, turn_s: float, prints: bool) -> dict:
    step = make_step(step_s)
    steps = max(10, round(turn_s / step_s))
    ratios: dict[str, list[list[float]]] = {name: [[], []] for name in WAYS}
    before = run_turn(folder, step, steps, prints, OFF)
    for _ in range(turns):
        for name, way in WAYS.items():
            taken = run_turn(folder, step, steps, prints, way)
            after = run_turn(folder, step, steps, prints, OFF)
            for place, kept in enumerate(ratios[name]):
                kept.append(2 * taken[place] / (before[place] + after[place]))
            before = after
    label = f"a step of {step_s * 1e3:g} ms{' and a line' if prints else ''}"
    return {
        f"{label}, {name}, {what}": [round(part, 4) for part in statistics.quantiles(kept, n=4)]
        for name, found in ratios.items()
        for what, kept in zip(("wall clock", "processor"), found, strict=True)
    }


def measure_share(folder: str, seconds: float) -> dict:
    """Share of a core that the thread uses which reads the machine at the usual cadence."""
    session = quark.start_run(project="bench", storage_dir=folder, capture=None)
    time.sleep(5)  # psutil is imported, and the driver opened, if there is one
    thread = next(t for t in threading.enumerate() if t.name == "quark-hardware")

    def read_cpu_s() -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    begun_s, begin = read_cpu_s(), time.monotonic()
    time.sleep(seconds)
    share = (read_cpu_s() - begun_s) / (time.monotonic() - begin)
    session.end_run()
    processes = sum(name.isdigit() for name in os.listdir("/proc"))
    return {
        "the machine every 10 s, % of a core": round(100 * share, 4),
        "processes of this machine": processes,
    }


def measure_print(folder: str, calls: int) -> dict:
    """What one `print` of a line takes to a file, in microseconds."""
    figures = {}
    line = "step 120 loss 0.123456 lr 0.001 1234 it/s"
    for name, way in {"off": OFF, "captured": OFF | {"capture": "sys"}}.items():
        session = quark.start_run(project="bench", storage_dir=folder, **way)
        taken = []
        for _ in range(calls):
            begin = time.perf_counter_ns()
            print(line)
            taken.append(time.perf_counter_ns() - begin)
            time.sleep(0.0005)
        session.end_run()
        taken.sort()
        figures[f"print of a line, {name}, p50 us"] = taken[calls // 2] / 1000
        figures[f"print of a line, {name}, p99 us"] = taken[int(calls * 0.99)] / 1000
    return figures


def main() -> None:
    parser = make_parser(__doc__, ("print", "steps", "share"), quick="fewer and shorter turns")
    arguments = parse(parser)
    # A turn is longer than the machine's figures are apart.
    turns, turn_s, share_s = (4, 1.0, 20.0) if arguments.quick else (6, 12.0, 150.0)
    figures: dict = {}
    shown = sys.stdout
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        # A terminal's own slowness would hide what is measured.
        sys.stdout = nothing
        try:
            if "print" in arguments.parts:
                figures |= measure_print(folder, 500 if arguments.quick else 4000)
            if "steps" in arguments.parts:
                for step_s in (0.001, 0.05):
                    for prints in (False, True):
                        figures |= measure_steps(folder, step_s, turns, turn_s, prints)
            if "share" in arguments.parts:
                figures |= measure_share(folder, share_s)
        finally:
            sys.stdout = shown
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}} {value}")
    write(arguments, figures)


if __name__ == "__main__":
    main()
