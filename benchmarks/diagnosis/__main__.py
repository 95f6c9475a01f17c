"""python -m benchmarks.diagnosis make|score|trace|list ...; run from the root of the project."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from benchmarks.diagnosis.campaign import parse_seeds, run_campaign, silence
from benchmarks.diagnosis.families import FAMILIES, list_scenarios


def main() -> int:
    arguments = _parse()
    if arguments.command == "list":
        return _list(arguments.family)
    if arguments.command == "make":
        made = run_campaign(
            arguments.out,
            family=arguments.family,
            seeds=arguments.seeds,
            every=arguments.every,
            jobs=arguments.jobs,
            only=arguments.only,
        )
        return 1 if any("error" in run for run in made) else 0
    if arguments.command == "trace":
        return _trace(arguments)
    # Late: scoring needs the analyzers, making runs does not.
    from benchmarks.diagnosis.reporting import print_report
    from benchmarks.diagnosis.scoring import score_folder

    figures = score_folder(
        arguments.runs, jobs=arguments.jobs, only=arguments.only, family=arguments.family
    )
    print_report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnosis",
        description="Real small trainings with faults put in, and healthy ones; what the "
        "analyzers say of them, against what is true.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--family", default="all", help=f"{', '.join(FAMILIES)} or all (default)")
    shared.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="in the name")
    shared.add_argument("--jobs", type=int, default=1, help="processes (1)")
    commands.add_parser("list", parents=[shared], help="the scenarios")
    make = commands.add_parser("make", parents=[shared], help="make runs; those there are kept")
    make.add_argument("--out", type=Path, required=True, help="folder of the runs")
    make.add_argument("--seeds", type=parse_seeds, default=(0,), help="such as 0-4 or 0,3 (0)")
    make.add_argument("--every", type=int, default=5, help="steps from probe to probe (5)")
    score = commands.add_parser("score", parents=[shared], help="score the analyzers on runs")
    score.add_argument("runs", type=Path, help="folder of the runs")
    score.add_argument("--json", type=Path, help="also write the figures here")
    trace = commands.add_parser("trace", parents=[shared], help="do the sums of all texts again")
    trace.add_argument("runs", type=Path, help="folder of the runs")
    return parser.parse_args()


def _trace(arguments: argparse.Namespace) -> int:
    from benchmarks.diagnosis.scoring import find_runs, trace_run

    runs = find_runs(arguments.runs, family=arguments.family, only=arguments.only)
    figures, wrong = 0, 0
    for run in runs:
        count, said = trace_run(run)
        figures, wrong = figures + count, wrong + len(said)
        for line in said:
            print(f"{run}: {line}")
    print(f"{len(runs)} runs, {figures} figures in texts, {wrong} that no record bears out")
    return 1 if wrong else 0


def _list(family: str) -> int:
    scenarios = list_scenarios(family)
    for scenario in scenarios:
        print(f"{scenario.kind:<8} {scenario.name}")
    print(dict(Counter(scenario.kind for scenario in scenarios)))
    return 0


if __name__ == "__main__":
    silence()
    raise SystemExit(main())
