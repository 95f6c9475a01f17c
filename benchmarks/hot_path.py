"""What logging costs the training thread, beside a floor measured in the same run.

    python benchmarks/hot_path.py [--quick] [--json FILE]

The floor is the least that any tracker must do: encode the values with msgspec
and append them to a list. All is measured with default settings, unless a figure's name says
otherwise. Figures of a shared machine move; the ratios in
one run hold. Start-up, memory and reading are measured in processes of their
own. Nothing here fails on a slow machine: it prints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
from figures import Figure, make_parser, parse, print_figures, write

from quark import MetricsLogger, TrainingSession

GOALS = {
    "one scalar, tight, p50 us": 2.5,
    "20 metrics, tight, p50 us": 10.0,
    "one scalar, paced 2 ms, p50 / floor": 3.0,
    "10,000 scalars with the end, s": 0.15,
    "peak memory, MiB": 60.0,
    "process start to first log, s": 0.3,
    "import quark, s": 0.1,
    "read 10,000 points, new process, ms": 250.0,
    "read 10,000 points again, ms": 2.0,
    "one scalar, tight, without the black box, p50 us": 2.0,
    "a timed block, us": 1.0,
    "a value aggregated, us": 1.0,
    "a step of progress, us": 1.0,
}


_ROUNDS = 5


def measure(call: Callable[[int], object], calls: int, pause_s: float = 0.0) -> tuple[float, float]:
    """p50 and p99 of a call, in microseconds."""
    clock = time.perf_counter_ns
    taken = []
    for index in range(calls):
        if pause_s:
            time.sleep(pause_s)
        begin = clock()
        call(index)
        taken.append(clock() - begin)
    taken.sort()
    return taken[calls // 2] / 1000, taken[int(calls * 0.99)] / 1000


def make_floor(values: dict[str, float]) -> Callable[[int], object]:
    encode, kept = msgspec.msgpack.Encoder().encode, []

    def floor(index: int) -> None:
        kept.append(encode((time.time_ns(), index, values)))

    return floor


def run_child(program: str, *arguments: str) -> list[float]:
    """Numbers that a program in a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return [float(word) for word in done.stdout.split()]


FIRST_LOG = """
import sys, time
import quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
quark.MetricsLogger(session).log("m", 1.0, step=0)
print(time.time() - float(sys.argv[2]))
sys.stdout.flush()
import os
os._exit(0)
"""
MEMORY = """
import sys, quark
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(10_000):
        metrics.log("train/loss", 1.0 / (step + 1), step=step)
# Not ru_maxrss, which still counts what the parent had before exec.
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(int(status["VmHWM"].split()[0]) / 1024)
"""
IMPORT = "import time; t = time.perf_counter(); import quark; print(time.perf_counter() - t)"
READ = """
import sys, time
begin = time.perf_counter()
import quark
metrics = quark.MetricsLogger(quark.open_run(sys.argv[2], sys.argv[1]))
columns = metrics.columns(metric_key="train/loss")
first = time.perf_counter() - begin
again = []
for _ in range(20):
    begin = time.perf_counter()
    columns = metrics.columns(metric_key="train/loss")
    again.append(time.perf_counter() - begin)
assert columns.count == 10_000
print(first * 1000, sorted(again)[10] * 1000)
"""
READ_AFTER_LOG = """
import sys, time, quark
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    taken = []
    for step in range(200):
        metrics.log("m", 1.0, step=step)
        begin = time.perf_counter()
        assert len(metrics.read(limit=1)) == 1
        taken.append(time.perf_counter() - begin)
print(sorted(taken)[100] * 1000)
"""


def measure_without_black_box(folder: str, calls: int) -> dict[str, float]:
    """The tight calls again, with no record in shared memory when a call returns."""
    many = {f"train/metric{index}": index / 3 for index in range(20)}
    os.environ["QUARK_BLACK_BOX"] = "0"
    figures = {}
    with TrainingSession.start_run(project="bench", storage_dir=folder) as session:
        metrics = MetricsLogger(session)
        for name, call, count in (
            ("one scalar", lambda index: metrics.log("train/loss", 0.5, step=index), calls),
            ("20 metrics", lambda index: metrics.log_many(many, step=index), calls // 4),
        ):
            p50, p99 = measure(call, count)
            figures[f"{name}, tight, without the black box, p50 us"] = p50
            figures[f"{name}, tight, without the black box, p99 us"] = p99
    del os.environ["QUARK_BLACK_BOX"]
    return figures


def measure_calls(folder: str, calls: int, paced: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    one = {"train/loss": 0.5}
    many = {f"train/metric{index}": index / 3 for index in range(20)}
    session = TrainingSession.start_run(project="bench", storage_dir=folder)
    metrics = MetricsLogger(session)

    def log_one(index: int) -> None:
        metrics.log("train/loss", 0.5, step=index)

    def log_twenty(index: int) -> None:
        metrics.log_many(many, step=index)

    for name, call, floor, count, pause_s in (
        ("one scalar, tight", log_one, make_floor(one), calls, 0.0),
        ("20 metrics, tight", log_twenty, make_floor(many), calls // 4, 0.0),
        ("one scalar, paced 2 ms", log_one, make_floor(one), paced, 0.002),
        ("20 metrics, paced 2 ms", log_twenty, make_floor(many), paced, 0.002),
    ):
        floor_p50, floor_p99 = measure(floor, count, pause_s)
        p50, p99 = measure(call, count, pause_s)
        figures[f"{name}, p50 us"] = p50
        figures[f"{name}, p99 us"] = p99
        figures[f"{name}, floor p50 us"] = floor_p50
        figures[f"{name}, floor p99 us"] = floor_p99
        figures[f"{name}, p50 / floor"] = p50 / floor_p50
    session.end_run()

    session = TrainingSession.start_run(project="bench", storage_dir=folder)
    metrics = MetricsLogger(session)
    begin = time.perf_counter()
    for step in range(10_000):
        metrics.log("train/loss", 1.0 / (step + 1), step=step)
    session.end_run()
    figures["10,000 scalars with the end, s"] = time.perf_counter() - begin
    figures["read 10,000 points, new process, ms"], figures["read 10,000 points again, ms"] = (
        run_child(READ, folder, str(session.run_id))
    )
    return figures


def measure_loop(folder: str, times: int) -> dict[str, float]:
    """What a turn of a loop pays for, sums included; the least of some rounds, by the turn."""
    session = TrainingSession.start_run(project="bench", storage_dir=folder)
    metrics = MetricsLogger(session)

    def time_blocks() -> None:
        for _ in range(times):
            with metrics.timer("block"):
                pass

    def aggregate() -> None:
        for _ in range(times):
            metrics.aggregate("value", 0.5)

    def tell() -> None:
        for _ in metrics.progress(range(times)):
            pass

    figures = {}
    for name, call in (
        ("a timed block", time_blocks),
        ("a value aggregated", aggregate),
        ("a step of progress", tell),
    ):
        taken = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        figures[f"{name}, us"] = min(taken) / times * 1e6
    session.end_run()
    return figures


def measure_processes(folder: str, times: int) -> dict[str, float]:
    def median(program: str) -> float:
        found = [run_child(program, folder, repr(time.time()))[0] for _ in range(times)]
        return sorted(found)[times // 2]

    return {
        "process start to first log, s": median(FIRST_LOG),
        "import quark, s": median(IMPORT),
        "peak memory, MiB": median(MEMORY),
        "read right after a log, ms": median(READ_AFTER_LOG),
    }


def main() -> None:
    arguments = parse(make_parser(__doc__, quick="fewer calls"))
    os.environ.pop("QUARK_BLACK_BOX", None)
    calls, paced, times = (4_000, 150, 3) if arguments.quick else (40_000, 1_000, 5)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_calls(folder, calls, paced)
        figures.update(measure_without_black_box(folder, calls))
        figures.update(measure_loop(folder, calls))
        figures.update(measure_processes(folder, times))
    print_figures(
        "What logging costs",
        [Figure(name, value, at_most=GOALS.get(name)) for name, value in figures.items()],
    )
    write(arguments, figures)


if __name__ == "__main__":
    main()
