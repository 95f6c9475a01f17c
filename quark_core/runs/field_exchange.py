"""Sets a field of a run, a group or a project only where it has a certain value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark_core.backends.coordination import SupportsCoordination, refuse_coordination
from quark_core.backends.registry import default_registry
from quark_core.errors import SchemaValidationError
from quark_core.records.runs import RunContext
from quark_core.runs.backend_choice import choose_primary, open_primary, open_reader
from quark_core.runs.run_editing import find_user


def exchange_run_field(context: RunContext, field: str, expect: Any, value: Any) -> bool:
    """Set a field of a run where it has a value; whether it had it.

    Raises:
        SchemaValidationError: A bad name or value, or a rank that does not know its run.
        RunNotFoundError: The store has no such run, or has it in the trash.
        SessionStoreError: The store cannot be written, or can compare nothing.
    """
    if context.run_id is None:
        raise SchemaValidationError("run: this rank does not know the id of its run")
    with _open(context.storage_dir) as store:
        return store.compare_and_set(context.run_id, field, expect, value, by=find_user())


def exchange_group_field(
    root: Path, project: str, path: str, field: str, expect: Any, value: Any
) -> bool:
    """As `exchange_run_field`, of a group, or of the project where `path` is empty.

    Raises:
        SchemaValidationError: A bad name or value, or no such project.
        SessionStoreError: The store cannot be written, or can compare nothing.
    """
    with _open(root) as store:
        return store.compare_and_set_group(project, path, field, expect, value, by=find_user())


@contextmanager
def _open(root: Path) -> Iterator[SupportsCoordination]:
    # Opened for reading first: a wrong root must leave no store.
    open_reader(root, takes_over=False).close()
    choice = choose_primary(default_registry())
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        store: object = primary
        if not isinstance(store, SupportsCoordination):
            raise refuse_coordination(f"the store of {root} ({choice.definition.name})")
        yield store
    finally:
        primary.close()
