"""The composition root: settings and registry in, the backends of one run out.

It knows backends only through their definitions, so it imports none.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

from quark_core import settings
from quark_core.backend import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
    RankPolicy,
    RunLocation,
    SupportsPrimary,
    SupportsReplay,
)
from quark_core.capability_check import check_capabilities
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.black_box import BlackBox, open_black_box
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    journal_directory,
)
from quark_core.delivery.lane import Lane, RetryPolicy
from quark_core.delivery.lane_files import lane_folder_name
from quark_core.delivery.origin import Origin
from quark_core.delivery.quarantine import Quarantine
from quark_core.delivery.stream import RunStream
from quark_core.errors import SchemaValidationError, SessionStoreError, UnknownBackendError
from quark_core.process import current_process
from quark_core.ranks import RankInfo
from quark_core.redaction import redact_text
from quark_core.registry import BackendRegistry, default_registry

__all__ = [
    "BackendChoice",
    "Plan",
    "locate_run",
    "open_lane",
    "open_primary",
    "open_reader",
    "open_stream",
    "plan_backends",
]

_log = logging.getLogger("quark")

_SPECIFICATION = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_.-]*)(?:(?P<mark>[+:])(?P<rest>.*))?")
_DEFAULT_PRIMARY = "embedded"
_KEEP_NOTHING = "none"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One backend that was asked for: what, where, and how it was written."""

    definition: BackendDefinition
    location: str
    options: tuple[tuple[str, str], ...]
    specification: str

    def configure(
        self, storage_dir: Path, *, run_id: str | None = None, project: str | None = None
    ) -> BackendConfig:
        """The configuration that the backend is opened with."""
        return BackendConfig(
            storage_dir=storage_dir,
            run_id=run_id,
            project=project,
            location=self.location,
            options=dict(self.options),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The backends of one run on this rank; none of them is open yet."""

    primary: BackendChoice | None
    mirrors: tuple[BackendChoice, ...]

    @property
    def choices(self) -> tuple[BackendChoice, ...]:
        """All of them, the primary first."""
        return (*([self.primary] if self.primary else []), *self.mirrors)

    @property
    def specifications(self) -> tuple[str, ...]:
        """How to ask for the same backends again, the primary first, without secrets."""
        return tuple(redact_text(choice.specification) for choice in self.choices)


def plan_backends(
    backends: str | Sequence[str] | None,
    rank: RankInfo,
    registry: BackendRegistry | None = None,
) -> Plan:
    """Decide once which backends this rank has.

    Args:
        backends: Names or URIs of what is added, as a list or separated by
            commas; None takes QUARK_BACKENDS. "none" keeps nothing.
        rank: Place of this process; a backend that is not for this rank does
            not exist here.
        registry: Installed backends.

    Raises:
        UnknownBackendError: A name or scheme that nothing answers to.
        BackendContractError: A named plugin that was left out.
        SchemaValidationError: `backends` is of a wrong type, or names two primaries.
        SessionStoreError: QUARK_REQUIRE_SERVICE is set and QUARK_PERSISTENCE_URL is not.
    """
    registry = registry or default_registry()
    wanted = _split(backends)
    if wanted == [_KEEP_NOTHING]:
        return Plan(None, ())
    chosen = [_choose(text, registry) for text in wanted]
    choices = list({(c.definition.name, c.location, c.options): c for c in chosen}.values())
    primaries = [c for c in choices if Capability.PRIMARY in c.definition.capabilities]
    if len(primaries) > 1:
        names = " and ".join(choice.definition.name for choice in primaries)
        raise SchemaValidationError(f"backends: {names} are both primary stores; name one")
    primary = primaries[0] if primaries else _choose(_default_primary(), registry)
    mirrors = [choice for choice in choices if choice is not primary]

    def is_here(choice: BackendChoice) -> bool:
        return rank.rank == 0 or choice.definition.rank_policy is RankPolicy.ALL

    return Plan(
        primary if is_here(primary) else None,
        tuple(choice for choice in mirrors if is_here(choice)),
    )


def open_primary(choice: BackendChoice, config: BackendConfig) -> SupportsPrimary:
    """Open a primary store and hold it to what it declares, by BackendContractError.

    Raises:
        SessionStoreError: It cannot be opened.
    """
    backend = _open(choice.definition, config)
    assert isinstance(backend, SupportsPrimary)
    return backend


def open_reader(
    storage_dir: Path, registry: BackendRegistry | None = None, specification: str | None = None
) -> SupportsPrimary:
    """Open the primary store of a storage root for reading only.

    Raises:
        SessionStoreError: There is no store, or it cannot be read.
    """
    registry = registry or default_registry()
    choice = _choose(specification or _default_primary(), registry)
    config = replace(choice.configure(storage_dir), read_only=True)
    return open_primary(choice, config)


def open_stream(
    plan: Plan,
    primary: SupportsPrimary | None,
    config: BackendConfig,
    origin: Origin,
    run_path: Path,
    *,
    on_primary_failure: Callable[[BaseException], None] | None = None,
    on_second: Callable[[], None] | None = None,
    on_beat: Callable[[], None] | None = None,
    on_gap: Callable[[Mapping[str, int]], None] | None = None,
    retry: RetryPolicy | None = None,
) -> RunStream:
    """A stream with its journal and one lane per backend; not started yet.

    The primary is open already; mirrors open on their lane's thread. Where
    there is no backend, there is no journal either.
    """
    choices = plan.choices
    if not choices:
        return RunStream(origin)
    entries = _describe_lanes(plan)
    box = open_black_box(origin)
    folder, journal = _open_journal(config, origin, run_path, entries, box)
    log = BatchLog(
        journal=journal,
        journal_capacity_bytes=settings.journal_capacity_bytes(
            run_path if folder is None else folder.path
        ),
        replay=_find_replay(primary, origin),
    )
    lanes, leases = [], []
    for entry, choice in zip(entries, choices, strict=True):
        if folder is not None:
            lease = folder.lease(entry.name)
            lease.take()
            leases.append(lease)
        opened = primary if entry.primary else None
        lanes.append(
            Lane(
                entry.name,
                _opener(choice, replace(config, run_path=run_path), opened),
                log.open_cursor(primary=entry.primary),
                Quarantine(run_path / "quarantine" / lane_folder_name(entry.name), entry.name),
                primary=entry.primary,
                idempotent=Capability.IDEMPOTENT in choice.definition.capabilities,
                mark=None if folder is None or _retains(opened) else folder.mark(entry.name),
                retry=retry,
                on_failure=on_primary_failure if entry.primary else None,
            )
        )
    return RunStream(
        origin,
        log,
        lanes,
        folder=folder,
        leases=leases,
        retain=_retains(primary),
        black_box=box,
        on_second=on_second,
        on_beat=on_beat,
        on_gap=on_gap,
    )


def open_child_stream(
    plan: Plan,
    config: BackendConfig,
    origin: Origin,
    run_path: Path,
    *,
    on_gap: Callable[[Mapping[str, int]], None] | None = None,
) -> RunStream:
    """A stream of a forked process: a journal that another process delivers; not started yet.

    A child opens no backend: SQLite's locks lie in the memory of the process,
    and a fork copies what the parent held, so the child would believe in them.
    """
    entries = _describe_lanes(plan)
    box = open_black_box(origin)
    folder, journal = _open_journal(config, origin, run_path, entries, box)
    if folder is None:
        return RunStream(origin)
    log = BatchLog(journal=journal)
    return RunStream(origin, log, folder=folder, black_box=box, on_gap=on_gap)


def open_lane(
    manifest: Manifest, entry: LaneEntry, registry: BackendRegistry | None = None
) -> tuple[Backend, bool]:
    """Open the backend of a lane that a process left behind; for `sync_folder`.

    Returns the backend, and whether a batch may be sent to it twice.

    Raises:
        UnknownBackendError: The backend is not installed here.
        Exception: Whatever the backend raises when it cannot be opened.
    """
    choice = _choose(entry.specification, registry or default_registry())
    config = replace(
        choice.configure(
            Path(manifest.storage_dir), run_id=manifest.run_id, project=manifest.project
        ),
        run_path=Path(manifest.run_path),
    )
    backend = _open(choice.definition, config)
    return backend, Capability.IDEMPOTENT in choice.definition.capabilities


def _retains(backend: object) -> bool:
    return bool(getattr(backend, "keeps_journal", False))


def _find_replay(
    primary: SupportsPrimary | None, origin: Origin
) -> Callable[[int, int], list[Batch]] | None:
    backend: object = primary
    if not isinstance(backend, SupportsReplay) or origin.run_id is None:
        return None
    run_id, replay = origin.run_id, backend.read_batches
    return lambda start, limit: replay(run_id, origin.writer_id, start, limit)


def _describe_lanes(plan: Plan) -> tuple[LaneEntry, ...]:
    """The lanes by name; two mirrors of one kind are told apart by what the user wrote."""
    counts = Counter(choice.definition.name for choice in plan.choices)
    entries = []
    for choice in plan.choices:
        specification = redact_text(choice.specification)
        name = choice.definition.name
        entries.append(
            LaneEntry(
                name if counts[name] == 1 else specification, specification, choice is plan.primary
            )
        )
    return tuple(entries)


def _open_journal(
    config: BackendConfig,
    origin: Origin,
    run_path: Path,
    entries: tuple[LaneEntry, ...],
    box: BlackBox | None,
) -> tuple[JournalFolder | None, Journal | None]:
    folder = JournalFolder(journal_directory(run_path, origin.run_id or "") / origin.writer_id)
    manifest = Manifest(
        run_id=origin.run_id or "",
        writer_id=origin.writer_id,
        attempt=origin.attempt,
        rank=origin.rank,
        project=config.project or "",
        storage_dir=str(config.storage_dir),
        run_path=str(run_path),
        lanes=entries,
        process=current_process(),
        black_box=None if box is None else str(box.path),
    )
    try:
        folder.write_manifest(manifest)
    except OSError as error:
        _log.warning("there is no journal for this run: %s cannot be made: %s", folder.path, error)
        return None, None
    return folder, Journal(folder.path, origin, prepare=lambda: folder.keep_manifest(manifest))


def _opener(
    choice: BackendChoice, config: BackendConfig, opened: Backend | None
) -> Callable[[], Backend]:
    its_config = replace(config, location=choice.location, options=dict(choice.options))
    return lambda: opened if opened is not None else _open(choice.definition, its_config)


def locate_run(primary: SupportsPrimary | None, storage_dir: Path, run_id: str) -> RunLocation:
    """Where a run lies; under the storage root where there is no primary to ask."""
    if primary is not None:
        return primary.locate(run_id)
    root = storage_dir / ".quark"
    return RunLocation(store_root=root, db_path=None, run_path=str(root / "runs" / run_id))


def _open(definition: BackendDefinition, config: BackendConfig) -> Backend:
    return check_capabilities(definition, definition.open(config))


def _default_primary() -> str:
    url = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    if url:
        return url
    if os.environ.get(settings.REQUIRE_SERVICE, "").strip() not in ("", "0"):
        raise SessionStoreError(
            f"{settings.REQUIRE_SERVICE} is set but {settings.PERSISTENCE_URL} is not: "
            "set it to the URL of your Quark service"
        )
    return _DEFAULT_PRIMARY


def _split(backends: str | Sequence[str] | None) -> list[str]:
    if backends is None:
        backends = os.environ.get(settings.BACKENDS, "")
    if isinstance(backends, str):
        backends = backends.split(",")
    if not isinstance(backends, Sequence) or not all(isinstance(b, str) for b in backends):
        raise SchemaValidationError("backends must be a str or a sequence of str")
    return [text.strip() for text in backends if text.strip()]


def _choose(text: str, registry: BackendRegistry) -> BackendChoice:
    match = _SPECIFICATION.fullmatch(text)
    if match is None:
        raise UnknownBackendError(
            f"backends: {text!r} is neither a name nor a URI "
            f"(installed: {', '.join(registry.names)})"
        )
    name, mark, rest = match["name"].lower(), match["mark"], match["rest"] or ""
    definition = registry.find(name)
    if name != definition.name and mark == ":":
        # The scheme is the location's own, such as https.
        return BackendChoice(definition, text, (), text)
    if mark == "+":
        # What follows is a URI of another kind, and its parameters are its own.
        return BackendChoice(definition, rest, (), text)
    location, _, parameters = rest.partition("?")
    options = tuple(parse_qsl(parameters, keep_blank_values=True))
    return BackendChoice(definition, location.removeprefix("//"), options, text)
