"""Prints the figures of the exam."""

from __future__ import annotations

from typing import Any


def print_report(figures: dict[str, Any]) -> None:
    """A line for each rule, the whole, and every mistake with the folder of its run."""
    print(
        f"{figures['runs']} runs: {figures['faults']} with a fault, {figures['healthy']} healthy, "
        f"{figures['unclear']} unclear (not scored); analysis {_tell(figures['analysis_s'])} s"
    )
    print()
    head = ("rule", "faults", "recall", "precision", "foreign", "delay", "early", "culprit", "of")
    print("{:<24}{:>8}{:>8}{:>11}{:>9}{:>8}{:>7}{:>9}{:>5}".format(*head))
    keys = "faults recall precision foreign delay_probes early culprits culprits_of".split()
    for rule, row in figures["rules"].items():
        cells = [_tell(row[key]) for key in keys]
        print("{:<24}{:>8}{:>8}{:>11}{:>9}{:>8}{:>7}{:>9}{:>5}".format(rule, *cells))
    print("(delay: median, in probes; early: alerts that begin before the fault)")
    print()
    print(f"macro recall                {_tell(figures['macro_recall'])}")
    print(f"specificity                 {_tell(figures['specificity'])}")
    print(f"100 sqrt(recall x spec.)    {_tell(figures['score'])}")
    print(f"faults with foreign alarms  {_tell(figures['faults_with_foreign_alarms'])}")
    print(f"faults called healthy       {len(figures['broken_called_healthy'])}")
    print(f"healthy, not called so      {_tell(figures['healthy_not_called_so'])}")
    seen_little = figures["no_problem_found"]
    print(
        f"no problem found (too little was recorded): {seen_little['healthy']} healthy, "
        f"{seen_little['faults']} faults"
    )
    phases = figures["phases"]
    print(f"phases: recall              {_tell(phases['recall'])} of {phases['expected']}")
    print(
        f"phases: forbidden ones in   {phases['runs_with_forbidden']} of "
        f"{phases['runs_that_forbid']} runs, {phases['healthy_with_forbidden']} of them healthy"
    )
    _list(figures, "broken_called_healthy")
    _list(figures, "misses", "rule")
    _list(figures, "false_alarms", "rule", "severity", "step", "culprit", "title")
    _list(figures, "culprit_mistakes", "rule", "named")
    _list(figures, "phase_mistakes", "what", "phase")
    _list(figures, "errors", "error")


def _list(figures: dict[str, Any], kind: str, *keys: str) -> None:
    entries = figures[kind]
    if not entries:
        return
    print(f"\n{kind.replace('_', ' ')} ({len(entries)})")
    for entry in entries:
        told = ", ".join(str(entry[key]) for key in keys)
        print(f"  {entry['scenario']} seed {entry['seed']}: {told}".removesuffix(": "))
        print(f"      {entry['truth']}\n      {entry['folder']}")


def _tell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}"
