"""What `quark rm`, `quark restore` and `quark gc` share: runs that are meant, a store to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.du import measure
from quark.cli.store_access import count_things, describe_several, find_ids
from quark_core.errors import RunNotFoundError

if TYPE_CHECKING:
    from quark_core.backends.edits import SupportsRemoval

SHOWN_RUNS = 20
"""Lines of a table of runs that are to go."""

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@contextmanager
def open_for_removal(root: Path) -> Iterator[SupportsRemoval]:
    """The store, to be changed; it must have been found to be there."""
    from dataclasses import replace

    from quark_core.ranks.launches import RankInfo
    from quark_core.runs.backend_choice import open_primary, plan_backends

    choice = plan_backends((), RankInfo()).primary
    assert choice is not None
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        yield measure(primary)
    finally:
        primary.close()


def choose_runs(
    texts: Sequence[str],
    known: Mapping[str, str | None],
    in_trash: Mapping[str, str | None] | None,
    where: str,
) -> list[str]:
    """The ids of runs that are given by id, by name, or by the beginning of one; each once.

    Args:
        texts: What was given.
        known: Names of the runs that it may be, by id.
        in_trash: Names of the runs in the trash; None where `known` is these.
        where: The store, as `name_store` has it.
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
            raise RunNotFoundError(
                f"no run begins with {text!r} in {where}; `quark runs` lists them"
            )
        if not found:
            raise RunNotFoundError(
                f"no run in the trash begins with {text!r} in {where}; `quark rm --list` lists them"
            )
        if len(found) > 1:
            raise RunNotFoundError(describe_several(text, found, known))
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def count_runs(runs: int) -> str:
    """`1 run`, or `3 runs`."""
    return count_things(runs, "run")
