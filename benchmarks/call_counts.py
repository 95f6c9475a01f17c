"""How many of Quark's functions, in how many files, run for one call or command.

    python benchmarks/call_counts.py [WAY ...] [--list] [--json FILE]

A function counts once for each way, however often it is called. Counted are functions, methods and
lambdas of quark, quark_backends, quark_core and quark_torch that Python calls, and in a command
also those that imports call. Bodies of modules and classes do not count, nor do comprehensions and
generator expressions, whose frames depend on the version of Python. Each way runs in a process of
its own with default settings and the embedded store; processes that it starts are not followed.

`log()` is counted in a run that has logged before, in the training thread, the delivery thread and
the lane, for 1.5 s, in which the row is stored and these threads take idle turns. Of five
repetitions the functions that most share count, so that a heartbeat in one changes nothing. Other
ways are counted in the thread that calls.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from figures import check, make_parser, write

ROOT = Path(__file__).parents[1]
PACKAGES = ("quark", "quark_backends", "quark_core", "quark_torch")
POINTS = 200

# Functions and files in version 0.2, counted by this script, and what they shall be at most.
IN_0_2 = {
    "log": (147, 29),
    "analyze": (678, 138),
    "why": (546, 108),
    "start_run": (380, 95),
    "end_run": (134, 38),
    "read": (111, 24),
    "compare": (719, 138),
    "show": (306, 64),
    "runs": (162, 43),
}
TARGETS = {"log": (100, 16), "analyze": (500, 75), "why": (380, 60)}

COMMANDS = {
    "analyze": ("analyze", "{new}"),
    "why": ("why", "{old}", "{new}"),
    "compare": ("compare", "{old}", "{new}"),
    "show": ("show", "{new}"),
    "runs": ("runs",),
}
# The start of a run is over when its environment has been recorded for the second time, after 5 s.
SETTLING_S = 7.0
REPETITIONS = 5
DELIVERY_S = 1.5
LOG_THREADS = ("MainThread", "quark-delivery", "quark-lane")

# A run of its own process, so that only the setting differs, as it does for who trains.
TRAINING = """
import sys, quark
lr = float(sys.argv[2])
weight = 3.0
with quark.start_run(project="p", storage_dir=sys.argv[1], config={"lr": lr}) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(int(sys.argv[3])):
        metrics.log("loss", weight * weight, step=step)
        weight -= lr * weight / 10
    print(session.run_id)
"""

Function = tuple[str, str, int]


class CallRecorder:
    """Notes which functions of Quark are called, by thread, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.codes: dict[str, set[CodeType]] = defaultdict(set)
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """Take a call, as `sys.setprofile` hands it over."""
        if self.is_on and event == "call":
            self.codes[threading.current_thread().name].add(frame.f_code)

    def take(self, threads: tuple[str, ...]) -> set[Function]:
        """Give what was called in threads whose names begin so, and forget all."""
        functions = {
            (str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname, code.co_firstlineno)
            for thread, codes in self.codes.items()
            for code in codes
            if thread.startswith(threads) and is_counted(code)
        }
        self.codes.clear()
        return functions


def is_counted(code: CodeType) -> bool:
    """Tell whether a code object is one of Quark's functions, by the rule of this module."""
    path = Path(code.co_filename)
    return (
        path.is_relative_to(ROOT)
        and path.relative_to(ROOT).parts[0] in PACKAGES
        # Bodies of modules and classes have no fast locals.
        and bool(code.co_flags & inspect.CO_OPTIMIZED)
        and code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
    )


def record_log(recorder: CallRecorder, folder: str) -> set[Function]:
    import quark

    session = quark.start_run(project="p", storage_dir=folder)
    metrics = quark.MetricsLogger(session)
    for step in range(3):
        metrics.log("loss", 0.5, step=step)
    time.sleep(SETTLING_S)
    found: list[set[Function]] = []
    for step in range(3, 3 + REPETITIONS):
        recorder.is_on = True
        metrics.log("loss", 0.1, step=step)
        recorder.is_on = False
        called = recorder.take(("MainThread",))
        recorder.is_on = True
        time.sleep(DELIVERY_S)
        recorder.is_on = False
        found.append(called | recorder.take(LOG_THREADS))
    session.end_run()
    counted = Counter(function for functions in found for function in functions)
    return {function for function, count in counted.items() if count > REPETITIONS // 2}


def record_call(recorder: CallRecorder, way: str, folder: str, run_id: str) -> set[Function]:
    import quark

    if way == "read":
        metrics = quark.MetricsLogger(quark.open_run(run_id, folder))
        recorder.is_on = True
        points = metrics.read(metric_key="loss")
        recorder.is_on = False
        assert len(points) == POINTS
        return recorder.take(("MainThread",))
    recorder.is_on = way == "start_run"
    session = quark.start_run(project="p", storage_dir=folder)
    recorder.is_on = False
    quark.MetricsLogger(session).log("loss", 0.5, step=0)
    recorder.is_on = way == "end_run"
    session.end_run()
    recorder.is_on = False
    return recorder.take(("MainThread",))


def record_command(recorder: CallRecorder, arguments: list[str]) -> set[Function]:
    sys.argv = ["quark", *arguments]
    recorder.is_on = True
    from quark.cli import main as run_quark

    try:
        run_quark()
    except SystemExit as end:
        if end.code not in (0, None):
            raise
    recorder.is_on = False
    return recorder.take(("MainThread",))


def record_way(way: str, folder: str, old: str, new: str) -> list[Function]:
    """The functions of one way, in this process."""
    recorder = CallRecorder()
    if way in COMMANDS:
        words = [word.format(old=old, new=new) for word in COMMANDS[way]]
        found = record_command(recorder, [*words, "--storage-dir", folder])
    elif way == "log":
        found = record_log(recorder, folder)
    else:
        found = record_call(recorder, way, folder, new)
    return sorted(found)


def run_child(*arguments: str) -> str:
    """The last line that a Python process prints."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=make_environment()
    )
    if done.returncode:
        raise SystemExit(f"{arguments[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def make_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def count_ways(ways: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the functions of each way."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = (
            run_child("-c", TRAINING, folder, rate, str(POINTS)) for rate in ("0.02", "0.5")
        )
        for way in ways:
            yield way, json.loads(run_child(__file__, way, "--in", folder, old, new))


def print_functions(functions: list[Any]) -> None:
    """Print the functions, file by file, the file with the most of them first."""
    files = Counter(file for file, _, _ in functions)
    for file, count in files.most_common():
        print(f"  {count:4} {file}")
        for _, name, line in (function for function in functions if function[0] == file):
            print(f"         {line:5} {name}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(IN_0_2))
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    parser.add_argument("--in", nargs=3, dest="places", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.places:
        print(json.dumps(record_way(arguments.ways[0], *arguments.places)))
        return
    check(parser, arguments.ways, IN_0_2)
    figures = {}
    print(f"{'functions / files of':<22}{'now':>11}{'in 0.2':>11}{'target':>11}")
    for way, functions in count_ways(arguments.ways or list(IN_0_2)):
        now = (len(functions), len({file for file, _, _ in functions}))
        figures[way] = now
        target = TARGETS.get(way)
        verdict = "" if target is None else "met" if now <= target else "MISSED"
        texts = [f"{pair[0]} / {pair[1]}" if pair else "" for pair in (now, IN_0_2[way], target)]
        print(f"{way:<22}" + "".join(f"{text:>11}" for text in texts), verdict, flush=True)
        if arguments.list:
            print_functions(functions)
    write(arguments, figures)


if __name__ == "__main__":
    main()
