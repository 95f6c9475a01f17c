"""python -m benchmarks.explanation_exam --out FOLDER; run from the root of the project.

Prints, for single changes, for pairs and for nothing, how many questions were answered rightly, and
each answer that was wrong. Runs that are there already are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.explanation_exam.campaign import Question, World, ask, make_world
from benchmarks.explanation_exam.changes import NEUTRAL, Change
from benchmarks.explanation_exam.papers import Task, list_nothing, list_pairs, list_singles
from benchmarks.explanation_exam.scoring import Mark, mark_change, mark_nothing

_GOALS = {"single": 0.90, "pairs": 0.75, "nothing": 1.0}
_WORLDS = {"train.py": (6, 34), "train_torch.py": (6, 4)}
"""Script -> runs of the base configuration, and others."""

_HALF = 0.5


def main() -> int:
    arguments = _parse()
    # Runs of the exam keep what runs keep by default, whatever the caller's shell says.
    for name in [name for name in os.environ if name.startswith("QUARK_")]:
        del os.environ[name]
    os.environ["QUARK_QUIET"] = "1"
    papers = {
        "single": list(list_singles()),
        "pairs": list(list_pairs()),
        "nothing": list(list_nothing()),
    }
    if arguments.short:
        papers = {part: _choose(part, tasks) for part, tasks in papers.items()}
    worlds = _make_worlds(arguments.out, papers, arguments.short)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        questions = {
            part: list(pool.map(lambda task: _ask(worlds, arguments.out, task), tasks))
            for part, tasks in papers.items()
        }
    effects = {
        question.changes[0].name: _measure_effect(question) for question in questions["single"]
    }
    marks = {part: [_mark(each, effects) for each in asked] for part, asked in questions.items()}
    return _report(marks, arguments.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.explanation_exam",
        description="Real small trainings with a known change between them, and what "
        "`quark.explain_change` says of it.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (2)")
    parser.add_argument("--short", action="store_true", help="a few questions of each kind")
    parser.add_argument("--json", type=Path, help="also write the marks here")
    return parser.parse_args()


def _choose(part: str, tasks: Sequence[Task]) -> list[Task]:
    """A few of the questions, of several kinds."""
    names = {
        "single": ("lr-0-0", "clip-3-58", "labels-5-5", "library-1-1"),
        "pairs": ("lr+comment-0-0", "labels+log_every-2-2"),
        "nothing": ("nothing-0-0", "nothing-1-51", "comment-0-0", "log_every-0-50"),
    }[part]
    by_name = {task.name: task for task in tasks}
    return [by_name[name] for name in names if name in by_name]


def _make_worlds(out: Path, papers: dict[str, list[Task]], short: bool) -> dict[str, World]:
    scripts = sorted({task.script for tasks in papers.values() for task in tasks})
    worlds = {}
    for script in scripts:
        seeds, tried = _WORLDS[script]
        worlds[script] = make_world(
            out / f"world-{Path(script).stem}",
            script=script,
            seeds=seeds,
            tried=20 if short else tried,
        )
    return worlds


def _ask(worlds: dict[str, World], out: Path, task: Task) -> Question:
    return ask(worlds[task.script], out / task.name, task.changes, seed=task.seed, other=task.other)


def _measure_effect(question: Question) -> float:
    """How far a change moves the result, whatever its size is."""
    return abs(math.log(question.after_loss / question.before_loss))


def _mark(question: Question, effects: dict[str, float]) -> Mark:
    import quark

    begun = time.perf_counter()
    explanation: Any = quark.explain_change(
        question.before, question.after, storage_dir=question.store
    )
    taken_s = time.perf_counter() - begun
    guilty = _find_guilty(question.changes, effects)
    mark = (
        mark_change(question, explanation, guilty)
        if guilty
        else mark_nothing(question, explanation)
    )
    print(f"{'ok ' if mark.right else 'NO '} {mark.name}  {taken_s:.1f} s  {mark.said}", flush=True)
    return mark


def _find_guilty(changes: Sequence[Change], effects: dict[str, float]) -> list[Change]:
    """The changes of a question that matter; beside a much larger one a small one does not."""
    matters = [change for change in changes if change not in NEUTRAL]
    known = [effects[change.name] for change in matters if change.name in effects]
    most = max(known, default=0.0)
    return [change for change in matters if effects.get(change.name, most) >= _HALF * most]


def _report(marks: dict[str, list[Mark]], path: Path | None) -> int:
    failed = False
    for part, each in marks.items():
        right = sum(mark.right for mark in each)
        share = right / max(1, len(each))
        failed |= share < _GOALS[part]
        print(f"{part}: {right} of {len(each)} right ({share:.0%}; goal {_GOALS[part]:.0%})")
    excluded = [mark for each in marks.values() for mark in each if mark.wrongly_excluded]
    print(f"wrongly ruled out: {len(excluded)} (goal 0)")
    for mark in excluded:
        print(f"  {mark.name}: {', '.join(mark.wrongly_excluded)}")
    if path is not None:
        text = json.dumps({part: [asdict(mark) for mark in each] for part, each in marks.items()})
        path.write_text(text + "\n")
    return 1 if failed or excluded else 0


if __name__ == "__main__":
    sys.exit(main())
