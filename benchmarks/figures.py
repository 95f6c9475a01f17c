"""What the benchmark programs share: the command line, tables, and timing."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any


def make_parser(
    description: str | None, parts: Collection[str] = (), *, quick: str = ""
) -> argparse.ArgumentParser:
    """A command line with `--json` and, where they are given, parts and `--quick`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    if parts:
        parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
        parser.set_defaults(known=tuple(parts))
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; all parts where none was named. Quark's log is silent from now on."""
    arguments = parser.parse_args()
    if known := getattr(arguments, "known", ()):
        check(parser, arguments.parts, known)
        arguments.parts = arguments.parts or [*known]
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    return arguments


def check(parser: argparse.ArgumentParser, given: Iterable[str], known: Collection[str]) -> None:
    """End with a message if something was asked for that there is not."""
    if unknown := [name for name in given if name not in known]:
        parser.error(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")


def run_parts(
    description: str | None, parts: Mapping[str, Callable[..., Any]], *, quick: str
) -> dict[str, Any]:
    """The whole of a program whose parts print: measures those asked for, writes the figures."""
    arguments = parse(make_parser(description, parts, quick=quick))
    if arguments.quick:
        print("This is the short form: the goals are meant for the full one.")
    figures = {}
    for part in arguments.parts:
        figures[part] = parts[part](quick=arguments.quick)
        print(f"\n({part}: {tell_load()})")
    write(arguments, figures)
    return figures


def tell_load() -> str:
    """How busy the machine is; more than one or two means that times are too long."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def write(arguments: argparse.Namespace, figures: object) -> None:
    """Write the figures where `--json` says; what is no JSON value must have `to_dict`."""
    if arguments.json:
        text = json.dumps(figures, indent=2, default=lambda value: value.to_dict())
        arguments.json.write_text(text + "\n")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: What was measured, with its unit.
        value: The number.
        at_least: The goal, where more is better.
        at_most: The goal, where less is better.
    """

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def goal(self) -> str:
        """The goal and whether it is met; empty where there is none."""
        if self.at_least is not None:
            return f"goal >= {self.at_least:g}: {_judge(self.value >= self.at_least)}"
        if self.at_most is not None:
            return f"goal <= {self.at_most:g}: {_judge(self.value <= self.at_most)}"
        return ""


def print_figures(title: str, figures: Sequence[Figure]) -> dict[str, float]:
    """Print a table; returns the figures by name."""
    width = max(len(figure.name) for figure in figures)
    print(f"\n{title}\n")
    for figure in figures:
        digits = 0 if abs(figure.value) >= 10_000 else 2 if abs(figure.value) >= 0.1 else 4
        print(f"{figure.name:<{width}}  {figure.value:>14,.{digits}f}   {figure.goal}".rstrip())
    return {figure.name: figure.value for figure in figures}


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; a column for each key."""
    print(f"\n{title}")
    if not rows:
        return
    names = [*rows[0]]
    table = [names] + [[_show(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(names))]
    for line in table:
        cells = zip(line, widths, strict=True)
        print("  " + "  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def time_call(call: Callable[[], object], times: int) -> float:
    """Median time of a call in seconds."""
    return time_side_by_side({"": call}, times)[""]


def time_side_by_side(calls: Mapping[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Median time of each call in seconds.

    They are measured in turns, so that what disturbs one disturbs all, each
    after a call that is not measured, so that none pays for what another one
    left in the caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(times):
        for name, call in calls.items():
            call()
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    return {name: median(found) for name, found in taken.items()}


def _judge(good: bool) -> str:
    return "met" if good else "missed"


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
