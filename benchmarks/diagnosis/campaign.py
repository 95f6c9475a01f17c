"""Makes the runs of the exam: scenarios times seeds, each a storage folder with its truth."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.families import find_scenario, list_scenarios
from benchmarks.diagnosis.scenario import Draw, Truth

TRUTH_FILE = "truth.json"


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0-4,7` as 0, 1, 2, 3, 4, 7.

    Raises:
        ValueError: It is not of this form.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(seeds))


def name_folder(out: Path, scenario: str, seed: int) -> Path:
    """Where the run of a scenario and seed lies."""
    return out / scenario.replace("/", "__") / f"seed_{seed:03d}"


def silence() -> None:
    """Keep what the runs warn of out of this process's output."""
    logging.getLogger("quark").setLevel(logging.CRITICAL)


def make_run(scenario_name: str, seed: int, directory: Path, *, every: int = 5) -> dict[str, Any]:
    """Train once and write the run and its truth; returns the content of the truth file.

    What was left of an earlier attempt is removed first.
    """
    import torch

    from benchmarks.diagnosis.recorder import Recorder

    os.environ.pop("QUARK_PERSISTENCE_URL", None)
    torch.set_num_threads(1)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    scenario = find_scenario(scenario_name)
    draw = Draw(scenario_name, seed)
    recorder = Recorder(directory, draw, every=every)
    torch.manual_seed(draw.torch_seed)
    begun = time.perf_counter()
    try:
        truth = scenario.train(recorder, draw)
    finally:
        recorder.close()
    if recorder.was_contended and "runtime_bottleneck_risk" not in truth.expected:
        tolerated = (*truth.tolerated, "runtime_bottleneck_risk")
        truth = replace(truth, tolerated=tolerated)
    written = {
        "scenario": scenario_name,
        "intended": scenario.kind,
        "seed": seed,
        "every": every,
        "val_every": recorder.val_every,
        "severity": draw.severity,
        "run_id": recorder.run_id,
        "duration_s": round(time.perf_counter() - begun, 3),
        "truth": truth.to_dict(),
    }
    # Last and whole: a folder with this file is a finished run.
    target = directory / TRUTH_FILE
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(written, indent=2) + "\n")
    partial.replace(target)
    return written


def run_campaign(
    out: Path,
    *,
    family: str = "all",
    seeds: Sequence[int] = (0,),
    every: int = 5,
    jobs: int = 1,
    only: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Make every run that is not there yet; prints a line for each.

    Args:
        out: Folder of the runs.
        family: Such as `third`, or `all`.
        seeds: Of each scenario.
        every: Steps from probe to probe.
        jobs: Processes.
        only: Texts, one of which a scenario's name must contain; all where empty.

    Returns:
        What `make_run` returned, of the runs made now; a run that failed has
        `error` in place of `truth`.
    """
    wanted = tuple(only)
    scenarios = [
        scenario.name
        for scenario in list_scenarios(family)
        if not wanted or any(text in scenario.name for text in wanted)
    ]
    waiting = [
        (name, seed, folder, every)
        for seed in seeds
        for name in scenarios
        if not ((folder := name_folder(out, name, seed)) / TRUTH_FILE).exists()
    ]
    print(f"{len(scenarios)} scenarios, {len(waiting)} runs to make in {out}", flush=True)
    if jobs <= 1:
        return [_tell(_try_run(task)) for task in waiting]
    # Forked children would share torch's threads and the store's; spawned ones do not.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=silence) as pool:
        futures = [pool.submit(_try_run, task) for task in waiting]
        return [_tell(future.result()) for future in as_completed(futures)]


def _try_run(task: tuple[str, int, Path, int]) -> dict[str, Any]:
    name, seed, folder, every = task
    try:
        return make_run(name, seed, folder, every=every)
    except Exception as error:
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}"
        return {"scenario": name, "seed": seed, "duration_s": 0.0, "error": told}


def _tell(made: dict[str, Any]) -> dict[str, Any]:
    if "error" in made:
        kind, reason = "ERROR", made["error"]
    else:
        truth = Truth.from_dict(made["truth"])
        kind, reason = truth.kind, truth.reason
    place = f"{made['scenario']:<44} {made['seed']:>3}"
    print(f"{place} {kind:<8} {made['duration_s']:6.2f} s  {reason}", flush=True)
    return made
