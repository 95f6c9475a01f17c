"""How the commands reach a store: one option, one reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from quark_core.backend import StoredRun, SupportsPrimary
from quark_core.composition import open_reader
from quark_core.errors import RunNotFoundError
from quark_core.run_arguments import resolve_storage_dir

__all__ = ["find_run", "json_option", "open_store", "print_json", "storage_option"]

F = TypeVar("F", bound=Callable[..., Any])


def storage_option(command: F) -> F:
    """Add --storage-dir to a command."""
    return click.option(
        "-d",
        "--storage-dir",
        type=click.Path(path_type=Path),
        default=None,
        help="Storage root that the runs lie under [default: the working directory].",
    )(command)


def json_option(command: F) -> F:
    """Add --json to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")(
        command
    )


def open_store(storage_dir: Path | None) -> SupportsPrimary:
    """The store of a storage root, for reading.

    Raises:
        SessionStoreError: There is none, or it cannot be read.
    """
    return open_reader(resolve_storage_dir(storage_dir))


def find_run(store: SupportsPrimary, prefix: str) -> StoredRun:
    """The run whose id, or whose name, is given; a prefix of the id is enough.

    Raises:
        RunNotFoundError: No run, or more than one, fits.
    """
    runs = store.list_runs()
    found = [stored for stored in runs if prefix in (stored.run.id, stored.run.name)]
    if not found:
        found = [stored for stored in runs if (stored.run.id or "").startswith(prefix)]
    if not found:
        raise RunNotFoundError(f"no run begins with {prefix!r}; `quark runs` lists them")
    if len(found) > 1:
        ids = ", ".join(str(stored.run.id) for stored in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunNotFoundError(f"{prefix!r} fits {len(found)} runs: {ids}{more}; give more of it")
    return found[0]


def print_json(value: Any) -> None:
    """Print a value as JSON; what is not finite becomes null, since JSON has no word for it."""
    click.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
