"""What text samples cost where they are logged, and how soon they are found again."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

from figures import print_rows

import quark

ROWS_A_STEP = 100
WORDS = (
    "the quick brown model of a house jumps over lazy numbers such as forty two and says that "
    "what it was asked is 3 = 3: so be it"
).split()


def measure_samples(*, quick: bool) -> list[dict[str, Any]]:
    """Microseconds of a row by its length, seconds of searches over all rows: of this thread."""
    random.seed(0)
    rows = [_measure_logging(characters, 200 if quick else 1000) for characters in (100, 600, 8000)]
    print_rows("A row of text samples, logged", rows)
    searches = _measure_searches(10_000 if quick else 100_000)
    print_rows("Searches over all rows, in the embedded store", searches)
    return rows + searches


def _write(characters: int) -> str:
    return " ".join(random.choices(WORDS, k=characters // 5))[:characters]


def _measure_logging(characters: int, count: int) -> dict[str, Any]:
    texts = [(_write(characters // 2), _write(characters // 2)) for _ in range(count)]
    with (
        tempfile.TemporaryDirectory() as folder,
        quark.start_run(project="samples", storage_dir=folder) as session,
        quark.SampleLogger(session) as samples,
    ):
        begin = time.thread_time()
        for step, (prompt, completion) in enumerate(texts):
            samples.log(prompt=prompt, completion=completion, reward=0.5, step=step, task="math")
        taken_s = time.thread_time() - begin
    return {"characters": characters, "us": taken_s / count * 1e6}


def _measure_searches(count: int) -> list[dict[str, Any]]:
    texts = [(_write(200), _write(400)) for _ in range(2000)]
    asked: dict[str, dict[str, Any]] = {
        "a text that is rare": {"search": "sample 77 of step 7"},
        "a text that is nowhere": {"search": "xyzzy"},
        "a condition on the reward": {"where": "reward > 0.99"},
        "a condition on an own column": {"where": "length == 3"},
        "a range of steps": {"step_min": 3, "step_max": 6},
        "the newest 100": {"limit": 100},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        quark.start_run(project="samples", storage_dir=folder) as session,
        quark.SampleLogger(session) as samples,
    ):
        for step in range(count // ROWS_A_STEP):
            rows = [
                {
                    "prompt": texts[(step * ROWS_A_STEP + n) % len(texts)][0],
                    "completion": f"{texts[(step + n) % len(texts)][1]} sample {n} of step {step}",
                    "reward": random.random(),
                    "length": n,
                }
                for n in range(ROWS_A_STEP)
            ]
            samples.log_many(rows, step=step)
            session.flush("journaled")
        session.flush("stored")
        found = []
        for name, arguments in asked.items():
            begin = time.thread_time()
            rows_found = quark.find_samples(session, **arguments).count
            seconds = time.thread_time() - begin
            found.append({"rows": count, "search": name, "found": rows_found, "s": seconds})
        return found
