"""python -m benchmarks.explanation_exam --out FOLDER; run from the root of the project.

Prints, for single changes, for pairs and for nothing, how many questions were answered rightly, and
each answer that was wrong. Runs that are there already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.explanation_exam.campaign import Question, World, ask, make_world
from benchmarks.explanation_exam.changes import Change
from benchmarks.explanation_exam.first import FIRST
from benchmarks.explanation_exam.paper import Paper, Task
from benchmarks.explanation_exam.scoring import Mark, mark_change, mark_nothing, mark_unrecorded
from benchmarks.explanation_exam.second.paper import SECOND

_GOALS = {"single": 0.90, "pairs": 0.75, "nothing": 1.0}
_PAPERS = {"first": FIRST, "second": SECOND}
_HALF = 0.5


@dataclass(frozen=True)
class _Answer:
    question: Question
    explanation: Any
    taken_s: float


def main() -> int:
    arguments = _parse()
    # Runs of the exam keep what runs keep by default, whatever the caller's shell says.
    for name in [name for name in os.environ if name.startswith("QUARK_")]:
        del os.environ[name]
    os.environ["QUARK_QUIET"] = "1"
    paper = _PAPERS[arguments.paper]
    parts = dict(paper.parts)
    if arguments.short:
        parts = {
            part: tuple(task for task in tasks if task.name in paper.short[part])
            for part, tasks in parts.items()
        }
    worlds = _make_worlds(arguments.out, paper, parts, arguments.short)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        answers = {
            part: list(pool.map(lambda task: _answer(worlds, paper, arguments.out, task), tasks))
            for part, tasks in parts.items()
        }
    effects = {
        each.question.changes[0].name: _measure_effect(paper, each.question)
        for each in answers["single"]
    }
    marks = {
        part: [_mark(paper, each, effects) for each in given] for part, given in answers.items()
    }
    return _report(marks, arguments.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.explanation_exam",
        description="Real small trainings with a known change between them, and what "
        "`quark.explain_change` says of it.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--paper", choices=sorted(_PAPERS), default="first", help="which questions (first)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (2)")
    parser.add_argument("--short", action="store_true", help="a few questions of each kind")
    parser.add_argument("--json", type=Path, help="also write the marks here")
    return parser.parse_args()


def _make_worlds(
    out: Path, paper: Paper, parts: dict[str, tuple[Task, ...]], short: bool
) -> dict[str, World]:
    scripts = sorted({paper.find_script(task) for tasks in parts.values() for task in tasks})
    return {
        script: make_world(
            paper, out / f"world-{Path(script).stem.replace('-m ', '')}", script=script, short=short
        )
        for script in scripts
    }


def _answer(worlds: dict[str, World], paper: Paper, out: Path, task: Task) -> _Answer:
    import quark

    world = worlds[paper.find_script(task)]
    question = ask(world, out / task.name, task.changes, seed=task.seed, other=task.other)
    begun = time.perf_counter()
    explanation = quark.explain_change(question.before, question.after, storage_dir=question.store)
    return _Answer(question, explanation, time.perf_counter() - begun)


def _measure_effect(paper: Paper, question: Question) -> float:
    return paper.measure_effect(question.before_result, question.after_result)


def _mark(paper: Paper, answer: _Answer, effects: dict[str, float]) -> Mark:
    question, explanation = answer.question, answer.explanation
    guilty = _find_guilty(paper, question.changes, effects)
    if not guilty:
        mark = mark_nothing(question, explanation)
    elif any(change.recorded for change in guilty):
        mark = mark_change(question, explanation, [each for each in guilty if each.recorded])
    else:
        mark = mark_unrecorded(question, explanation)
    print(
        f"{'ok ' if mark.right else 'NO '} {mark.name}  {answer.taken_s:.1f} s  "
        f"{question.before_result:.3g} -> {question.after_result:.3g}  {mark.said}",
        flush=True,
    )
    return mark


def _find_guilty(
    paper: Paper, changes: tuple[Change, ...], effects: dict[str, float]
) -> list[Change]:
    """The changes of a question that matter; beside a much larger one a small one does not."""
    matters = [change for change in changes if change not in paper.neutral]
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
