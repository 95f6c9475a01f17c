"""Opens sweeps: one that is made here first, or one that is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.sweeps.definition import SweepDefinition, check_sweep_name, find_difference
from quark.sweeps.searches import choose_search, open_search
from quark.sweeps.store_link import StoreLink
from quark.sweeps.sweep import Sweep
from quark_core.config.arguments import check_label, resolve_storage_dir
from quark_core.config.redaction import redact_text, redact_values
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import StoredSweep, derive_sweep_key, make_sweep_id
from quark_core.runs.run_ids import name_store


def sweep(
    name: str,
    *,
    project: str | None = None,
    space: Mapping[str, Any] | None = None,
    metric: str | Sequence[str] | None = None,
    mode: str | Sequence[str] | None = None,
    search: object = None,
    trials: int | None = None,
    budget: int | None = None,
    constraints: str | Sequence[str] | None = None,
    max_failures: int = 3,
    stop: bool = False,
    stop_broken: bool = False,
    seed: int = 0,
    lease_s: float | None = None,
    storage_dir: str | Path | None = None,
) -> Sweep:
    """Open a sweep, in any number of processes and on any number of machines.

    The first one makes it; the others have the same one, by its project and name. Without
    `space` a sweep that is there already is joined.

    Args:
        name: What it is called; its runs are in the group `sweeps/<name>`.
        project: Its project; may be left out where the name alone finds it.
        space: Parameter -> `quark.uniform(…)`, `quark.integers(…)`, a list of values, or one
            value that stays the same.
        metric: What is to get better, as it is logged; a list of several for a front.
        mode: "min" or "max", or one for each metric.
        search: "random" (by default), "grid", "halving" or "asha", with settings as in
            "halving(rate=0.3, least=3)"; with Optuna "tpe", "hyperband", "cmaes", a sampler of
            its own, or a sampler and a pruner.
        trials: How many; all of a grid, and without end of the others, by default. More may be
            asked for at any time, but of halving, which begins with so many.
        budget: The steps of one whole trial, for searches that stop some early.
        constraints: What must hold besides, such as `["latency_ms <= 20"]`.
        max_failures: How many failed runs of a trial make it broken.
        stop: Whether `metrics.log` itself ends a training at a rung, by `StopRequested`, which
            ends the `with` block of its run and no more. It then waits there for the store, for
            5 s at most.
        stop_broken: Whether a training in which a monitor finds something broken is ended so.
        seed: Of everything that is drawn.
        lease_s: How long a trial is held by a worker that says nothing; 60 by default.
        storage_dir: Storage root, as of `start_run`.

    Raises:
        SchemaValidationError: A bad argument, one that looks like a secret, a sweep of this name
            that is another one, or none that could be joined.
        SessionStoreError: The store cannot be opened, or gives no trials to workers.
    """
    checked = check_sweep_name(name)
    project = None if project is None else check_label(project, "project")
    root = resolve_storage_dir(storage_dir)
    if space is None:
        return join_sweep(checked, project, root, lease_s=lease_s, given_search=search)
    if project is None:
        raise SchemaValidationError("project must be given where a sweep is made")
    choice = choose_search("random" if search is None else search)
    given = {
        "space": space, "metric": metric, "mode": mode, "search": str(choice),
        "trials": trials, "budget": budget, "constraints": constraints,
        "max_failures": max_failures, "stop": stop, "stop_broken": stop_broken, "seed": seed,
        "lease_s": 60.0 if lease_s is None else lease_s,
    }  # fmt: skip
    definition = SweepDefinition.build(given)
    _refuse_secrets(definition)
    link = StoreLink(root)
    try:
        # A search that the definition does not fit must leave no sweep behind.
        open_search(definition, make_sweep_id(), link.store, search).close()
        stored = _open(link, project, checked, definition)
        kept = SweepDefinition.build(stored.definition)
        return Sweep(link, stored, kept.with_local(definition), search)
    except BaseException:
        link.close()
        raise


def _refuse_secrets(definition: SweepDefinition) -> None:
    """See that all of a definition is kept as it is: trials are drawn from what is kept.

    Raises:
        SchemaValidationError: Something of it looks like a secret; the message says what.
    """
    wanted = definition.to_dict()
    kept = redact_values(wanted)
    part = next((part for part in wanted if kept.get(part) != wanted[part]), None)
    if part is None:
        return
    if part == "space":
        space = kept.get("space", {})
        name = next((n for n, each in wanted[part].items() if space.get(n) != each), "")
        part = f"space[{redact_text(name)!r}]"
    raise SchemaValidationError(
        f"{part} looks like a secret: a sweep is kept as it is, for all who work on it, so give "
        "secrets by the environment, or choose another name for what is none"
    )


def join_sweep(
    name: str,
    project: str | None,
    root: Path,
    *,
    lease_s: float | None = None,
    given_search: object = None,
) -> Sweep:
    """A sweep that is there already, by its name or id.

    Raises:
        SchemaValidationError: There is none of that name, or one in each of several projects.
        SessionStoreError: There is no store.
    """
    looking = StoreLink(root, read_only=True)
    try:
        stored = _find(looking, name, project)
    finally:
        looking.close()
    definition = dict(stored.definition)
    if lease_s is not None:
        definition["lease_s"] = lease_s
    return Sweep(StoreLink(root), stored, SweepDefinition.build(definition), given_search)


def _find(link: StoreLink, name: str, project: str | None) -> StoredSweep:
    if project is not None:
        try:
            return link.store.load_sweep(derive_sweep_key(project, name))
        except SchemaValidationError:
            raise SchemaValidationError(
                f"name: there is no sweep {name!r} of project {project!r} in "
                f"{name_store(link.store)}; with space=, metric= and mode= it is made"
            ) from None
    found = [each for each in link.store.list_sweeps() if name in (each.name, each.id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise SchemaValidationError(
            f"name: there is no sweep {name!r} in {name_store(link.store)}; make it with "
            "quark.sweep(name, project=…, space=…, metric=…, mode=…)"
        )
    projects = ", ".join(repr(each.project) for each in found)
    raise SchemaValidationError(
        f"name: there is a sweep {name!r} in several projects ({projects}): say which by project="
    )


def _open(link: StoreLink, project: str, name: str, definition: SweepDefinition) -> StoredSweep:
    """The sweep of this name, which is made where there is none."""
    wanted = definition.to_dict()
    key = derive_sweep_key(project, name)
    try:
        stored = link.store.load_sweep(key)
    except SchemaValidationError:
        try:
            return link.store.open_sweep(
                project, name, wanted, max_failures=definition.max_failures
            )
        except SchemaValidationError:
            # Somebody else was first, perhaps with another definition.
            stored = link.store.load_sweep(key)
    difference = find_difference(SweepDefinition.build(stored.definition), definition)
    if difference is not None:
        raise SchemaValidationError(
            f"name: there is a sweep {name!r} already, and it is another one: {difference}. Take "
            "another name, or join it without space="
        )
    return stored
