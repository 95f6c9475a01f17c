"""What `quark rm`, `quark restore` and `quark gc` share: runs that are meant, a store to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.du import measure
from quark_core.errors import RunNotFoundError

if TYPE_CHECKING:
    from quark_core.backends.removal import SupportsRemoval

__all__ = ["SHOWN_RUNS", "choose_runs", "count_runs", "find_ids", "open_for_removal", "yes_option"]

SHOWN_RUNS = 20
"""Lines of a table of runs that are to go."""

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@contextmanager
def open_for_removal(root: Path) -> Iterator[SupportsRemoval]:
    """The store, to be changed; it must have been found to be there."""
    from dataclasses import replace

    from quark_core.ranks.launches import RankInfo
    from quark_core.runs.composition import open_primary, plan_backends

    choice = plan_backends((), RankInfo()).primary
    assert choice is not None
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        yield measure(primary)
    finally:
        primary.close()


def choose_runs(
    texts: Sequence[str], known: Mapping[str, str | None], in_trash: Mapping[str, str | None] | None
) -> list[str]:
    """The ids of runs that are given by id, by the beginning of it, or by name; each once.

    Args:
        texts: What was given.
        known: Names of the runs that it may be, by id.
        in_trash: Names of the runs in the trash; None where `known` is these.
    """
    chosen = []
    for text in texts:
        found = find_ids(text, known)
        if not found and in_trash is not None and (trashed := find_ids(text, in_trash)):
            raise RunNotFoundError(
                f"{text!r} is in the trash already ({', '.join(trashed[:5])}): `quark restore` "
                "puts it back, `quark gc` frees its space"
            )
        if not found and in_trash is not None:
            raise RunNotFoundError(f"no run begins with {text!r}; `quark runs` lists them")
        if not found:
            raise RunNotFoundError(
                f"no run in the trash begins with {text!r}; `quark rm --list` lists them"
            )
        if len(found) > 1:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise RunNotFoundError(
                f"{text!r} fits {len(found)} runs: {', '.join(found[:5])}{more}; give more of it"
            )
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def find_ids(text: str, known: Mapping[str, str | None]) -> list[str]:
    """The ids of runs that a text names, or else begins."""
    found = [run_id for run_id, name in known.items() if text in (run_id, name)]
    # An empty text is the beginning of every id, and surely not what was meant.
    return found or [run_id for run_id in known if text and run_id.startswith(text)]


def count_runs(runs: int) -> str:
    """`1 run`, or `3 runs`."""
    return "1 run" if runs == 1 else f"{runs} runs"
