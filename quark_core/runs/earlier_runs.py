"""Earlier runs of a configuration: what `start_run(if_done=)` asks for, and decides by.

Two runs are of one configuration where the project, the configuration and its seeds are the
same, and the version where the start names one. What counts is what a run was started with,
which its field `uid` says, whatever was changed later; of runs that were started without
`if_done` it is what they have now. Archived runs do not count, so that archiving
one is how it is done anew.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from quark_core.backends.contract import StoredRun, SupportsRead, SupportsSearch
from quark_core.config.belonging import (
    EXCHANGED_FIELD,
    REVISION_FIELD,
    UID_FIELD,
    VERSION_FIELD,
    IfDone,
)
from quark_core.delivery.lane_files import Lease
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import JsonObject, flatten_json
from quark_core.records.run_digests import digest_config, is_seed, was_seed
from quark_core.runs.primary_reach import PrimaryReach

_log = logging.getLogger("quark")

_FINISHED = "completed"
_ALIVE = "running"
# How long a start waits for another one of the same configuration on this storage root.
_HOLD_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """What is to be done where a configuration has been run before.

    Attributes:
        done: The run that has done it, or is doing it now; None where there is work.
        unfinished: The run that is to be continued, or None.
        fields: What a new run has to note of itself: its `uid`, and its `revision`, from 1 on.
    """

    done: StoredRun | None = None
    unfinished: StoredRun | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def look_back(
    if_done: IfDone,
    reach: PrimaryReach,
    project: str,
    config: ConfigSnapshot,
    version: str | None,
) -> EarlierRuns | None:
    """What is known of a configuration that is about to be run; None where nobody can say.

    Args:
        if_done: What is wished.
        reach: The store.
        project: The project.
        config: The configuration.
        version: What the code is called, or None for any.
    """
    primary = reach.primary
    if primary is None:
        return None
    try:
        runs = reach.ask(lambda: _find_runs(primary, project, config, version))
    except QuarkError as error:
        _log.warning(
            "if_done=%r: the store does not say whether this configuration was run before (%s), "
            "so the run begins",
            if_done,
            error,
        )
        return None
    return _decide(if_done, runs, _make_uid(config))


def _find_runs(
    reader: SupportsRead, project: str, config: ConfigSnapshot, version: str | None
) -> list[StoredRun]:
    uids = {_make_uid(config), _make_uid(config, was_seed)}
    return [
        run
        for run in _find_candidates(reader, project, config, uids)
        if run.run.archived_at is None
        and _find_uid(run, version) in uids
        # Its configuration may be this one; what it has of another run is not.
        and EXCHANGED_FIELD not in run.fields
    ]


def _find_candidates(
    reader: SupportsRead, project: str, config: ConfigSnapshot, uids: Collection[str]
) -> list[StoredRun]:
    """Runs that were started as this one, or have its settings now; newest first."""
    from quark_core.runs.searching import build_search, find_runs

    if not isinstance(reader, SupportsSearch):
        return list(reader.list_runs(project=project))
    found: dict[str, StoredRun] = {}
    # A store keeps the digest that the version has made which wrote the run.
    digests = dict.fromkeys(digest_config(config.values, knows) for knows in (is_seed, was_seed))
    wheres = [f"config_digest == '{digest}'" for digest in digests]
    if not config.values:
        wheres = ["config_digest == null"]
    for where in (*wheres, *(f"field.{UID_FIELD} == '{uid}'" for uid in sorted(uids))):
        try:
            runs = find_runs(reader, build_search(project=project, where=where))
        except SchemaValidationError as error:
            if where not in wheres:
                continue  # no run has the field
            # A service of an older version, which cannot search for digests.
            _log.debug("runs are not searched by digests: %s", error)
            return list(reader.list_runs(project=project))
        found.update((run.run_id, run.stored) for run in runs)
    return sorted(
        found.values(), key=lambda run: (run.run.created_at, run.run.id or ""), reverse=True
    )


def _find_uid(run: StoredRun, version: str | None) -> str:
    """What a stored run was started as, as far as a start that names this version looks."""
    if version is not None and run.fields.get(VERSION_FIELD) != version:
        return ""
    noted = run.fields.get(UID_FIELD)
    if isinstance(noted, str):
        return noted
    return _make_uid(run.config or ConfigSnapshot(JsonObject()))


def _make_uid(config: ConfigSnapshot, knows: Callable[[str], bool] = is_seed) -> str:
    """A text that is equal for runs of one configuration with the same seeds."""
    seeds = sorted(_list_seeds(config.values, knows))
    said = f"{digest_config(config.values, knows)}\0{seeds!r}"
    return xxhash.xxh3_128_hexdigest(said.encode("utf-8", "replace"))


def _decide(if_done: IfDone, runs: Sequence[StoredRun], uid: str) -> EarlierRuns:
    """What is to be done, of the runs of one configuration, newest first."""
    numbers = [run.fields.get(REVISION_FIELD) for run in runs]
    known = [number for number in numbers if isinstance(number, int)]
    fields = {UID_FIELD: uid, REVISION_FIELD: max([len(runs), *known]) + 1}
    if if_done == "again":
        return EarlierRuns(fields=fields)
    for state in (_FINISHED, _ALIVE):
        for run in runs:
            if run.state == state:
                return EarlierRuns(done=run)
    unfinished = runs[0] if runs and if_done == "resume" else None
    return EarlierRuns(unfinished=unfinished, fields=fields)


def _list_seeds(
    values: Mapping[str, Any], knows: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    """Path and value of each seed of a configuration; 1 and 1.0 are one."""
    for path, value in flatten_json(values):
        if knows(path):
            whole = isinstance(value, float) and value.is_integer()
            yield path, str(int(value) if whole else value)


@contextlib.contextmanager
def hold_configuration(root: Path, project: str, config: ConfigSnapshot) -> Iterator[None]:
    """Let one start at a time look whether a configuration was run, and begin it.

    It holds among the processes that share a storage root. Who comes second waits until the
    first one has begun, 5 s at most; where there can be no file, nobody waits.
    """
    name = xxhash.xxh3_64_hexdigest(f"{project}\0{_make_uid(config)}".encode("utf-8", "replace"))
    path = root / ".quark" / "launches" / f"{name}.starting"
    lease = Lease(path)
    deadline = time.monotonic() + _HOLD_S
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Where nobody holds it and it cannot be taken, there can be no file.
        while not lease.take() and path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    except OSError as error:
        _log.debug("starts of one configuration are not kept apart: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lease.release()
