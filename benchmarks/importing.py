"""What an import takes: a million points out of event files, and the same again.

    python benchmarks/importing.py [--quick] [--json FILE]

The event file is written as TensorBoard's writers do, and each point that was stored is held
against TensorBoard's own reader. Goal: a million points in 10 s at most. Figures of a shared
machine move: processor time is given beside the time of the clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import make_parser, parse, write

POINTS = 1_000_000
QUICK_POINTS = 30_000
TAGS = 20


def main() -> None:
    arguments = parse(make_parser(__doc__, quick="fewer points"))
    figures = measure(QUICK_POINTS if arguments.quick else POINTS)
    for name, value in figures.items():
        print(f"{name:44} {value:,}")
    write(arguments, figures)


def measure(points: int) -> dict[str, Any]:
    from quark.importing.importer import ImportOptions, RunImport, import_all, open_intake
    from quark.importing.sources.tensorboard import find_runs

    with tempfile.TemporaryDirectory(prefix="quark-importing-") as folder:
        logs, store = Path(folder) / "logs", Path(folder) / "store"
        write_events(logs / "exp" / "events.out.tfevents.1700000000.host.1.0", points)

        def run() -> list[RunImport]:
            with open_intake(store, "tensorboard", ImportOptions()) as intake:
                return import_all(intake, lambda: find_runs(logs))

        (first,), first_s, first_cpu_s = take_time(run)
        (second,), second_s, _ = take_time(run)
        assert first.run_id is not None
        wrong = count_wrong(logs / "exp", store, first.run_id)
        size_bytes = sum(file.stat().st_size for file in logs.rglob("*") if file.is_file())
    return {
        "points": points,
        "points taken": first.points,
        "points that differ from TensorBoard's": wrong,
        "megabytes of event files": round(size_bytes / 2**20, 1),
        "import, s": round(first_s, 2),
        "import, s of the processor": round(first_cpu_s, 2),
        "points a second": round(points / first_s),
        "points taken again": second.points,
        "import again, s": round(second_s, 2),
    }


def take_time(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returns, its seconds, and those of the processor."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = run()
    return found, time.perf_counter() - began_s, time.process_time() - began_cpu_s


def write_events(path: Path, points: int) -> None:
    """An event file of scalars, a value in each event as `add_scalar` writes it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for number in range(points):
            event = Event(wall_time=1.7e9 + number * 0.01, step=number // TAGS)
            value = event.summary.value.add()
            value.tag = f"train/metric_{number % TAGS}"
            value.simple_value = (number * 37 % 1000) / 7
            writer.write(event.SerializeToString())


def count_wrong(logs: Path, store: Path, run_id: str) -> int:
    """Points that are not as TensorBoard's own reader has them, or that one of both lacks."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    import quark

    told = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    metrics = quark.MetricsLogger(quark.open_run(run_id, storage_dir=store))
    wrong = 0
    for tag in told.Tags()["scalars"]:
        columns = metrics.columns(metric_key=tag)
        fields = (columns[name].tolist() for name in ("step", "value", "time_us"))
        ours = list(zip(*fields, strict=True))
        theirs = [(one.step, one.value, round(one.wall_time * 1e6)) for one in told.Scalars(tag)]
        wrong += abs(len(ours) - len(theirs))
        wrong += sum(one != other for one, other in zip(ours, theirs, strict=False))
    return wrong


if __name__ == "__main__":
    main()
