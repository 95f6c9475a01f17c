"""The composition root: settings and registry in, the backends of one run out.

It knows backends only through their definitions, so it imports none.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_field

from quark_core.artifacts.payload_folder import PayloadFolder, PayloadSpool
from quark_core.backends.checks import check_capabilities, require_libraries
from quark_core.backends.contract import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
    RunLocation,
    SupportsArtifacts,
    SupportsPrimary,
    SupportsReplay,
)
from quark_core.backends.registry import BackendRegistry, default_registry
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.black_box import BlackBox, open_black_box
from quark_core.delivery.black_box_recovery import OpenLane
from quark_core.delivery.channel import choose_capacity
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    journal_directory,
)
from quark_core.delivery.lane import (
    AWAIT_CAP_S,
    Lane,
    RetryPolicy,
    check_run_is_there,
    wait_for_run,
)
from quark_core.delivery.lane_files import Lease, lane_folder_name
from quark_core.delivery.quarantine import Quarantine
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream
from quark_core.delivery.takeover import Takeover
from quark_core.errors import BackendUnavailable, SessionStoreError
from quark_core.runs.backend_choice import (
    BackendChoice,
    Plan,
    choose_backend,
    choose_primary,
)
from quark_core.runs.chosen_backends import find_chosen, remember
from quark_core.system.folders import describe_link, find_foreign_link, note_place
from quark_core.system.process import current_process, importing

_log = logging.getLogger("quark")


def open_primary(choice: BackendChoice, config: BackendConfig) -> SupportsPrimary:
    """Open a primary store and hold it to what it declares, by BackendContractError.

    Raises:
        SessionStoreError: It cannot be opened.
    """
    _check_primary(choice)
    backend = _open(choice.definition, config)
    assert isinstance(backend, SupportsPrimary)
    return backend


def open_run_primary(choice: BackendChoice, config: BackendConfig) -> SupportsPrimary:
    """Open a primary store for a run that is written: in a helper process, unless it says no.

    Raises:
        SessionStoreError: It cannot be opened.
    """
    _check_primary(choice)
    backend = _open_written(choice.definition, config)
    assert isinstance(backend, SupportsPrimary)
    return backend


def _check_primary(choice: BackendChoice) -> None:
    """Refuse a backend in which no run can live, before anything of it is opened.

    Raises:
        SessionStoreError: It is one; the message says by which call it is read.
    """
    definition = choice.definition
    if Capability.PRIMARY in definition.capabilities:
        return
    shown = redact_text(choice.specification)
    does = f"add it by backends={shown!r}"
    if Capability.READ in definition.capabilities:
        does += f", read its runs by quark.open_run({shown!r}, run_id)"
    raise SessionStoreError(
        f"backend {definition.name} ({shown}) is no primary store, so no run lives in it: {does}. "
        f"{settings.PERSISTENCE_URL} names a service only"
    )


def open_reader(
    storage_dir: Path,
    registry: BackendRegistry | None = None,
    specification: str | None = None,
    *,
    run_id: str | None = None,
    takes_over: bool = True,
) -> SupportsPrimary:
    """Open the primary store of a storage root for reading only.

    Args:
        storage_dir: The storage root.
        registry: The backends that there are.
        specification: How to ask for the store, in place of what the environment says.
        run_id: The run that is to be read, or the beginning of its id, where that is known.
        takes_over: Whether what processes that are gone have left is brought there first.

    Raises:
        SessionStoreError: There is no store, or it cannot be read.
    """
    registry = registry or default_registry()
    if specification is None:
        choice = choose_primary(registry)
    else:
        choice = choose_backend(specification, registry)
    config = replace(choice.configure(storage_dir), read_only=True)
    reader = open_primary(choice, config)
    if takes_over:
        _make_takeover(storage_dir, choice, reader, run_id).look()
    return reader


def make_takeover(storage_dir: Path, reader: object, run_id: str | None = None) -> Takeover:
    """What looks, for a reader of a root's store that stays open, after what others leave."""
    return _make_takeover(storage_dir, choose_primary(default_registry()), reader, run_id)


def _make_takeover(
    storage_dir: Path, choice: BackendChoice, reader: object, run_id: str | None
) -> Takeover:
    return Takeover(
        storage_dir,
        redact_text(choice.specification),
        open_lane,
        run_id=run_id,
        boxes_only=_retains(reader),
    )


def open_stream(
    plan: Plan,
    primary: SupportsPrimary | None,
    config: BackendConfig,
    origin: Origin,
    run_path: Path,
    *,
    awaits_run: bool = False,
    on_primary_failure: Callable[[BaseException], None] | None = None,
    on_second: Callable[[], None] | None = None,
    on_beat: Callable[[], None] | None = None,
    on_gap: Callable[[Mapping[str, int]], None] | None = None,
    retry: RetryPolicy | None = None,
) -> RunStream:
    """A stream with its journal and one lane per backend; not started yet.

    The primary is open already; mirrors open on their lane's thread. Where
    there is no backend, there is no journal either. With `awaits_run` another
    process begins the run, and the primary's lane waits until it has.

    Raises:
        SessionStoreError: The run's folder is there, with a link in it that leads out of it.
    """
    choices = plan.choices
    if not choices:
        return RunStream(origin)
    link = find_foreign_link(run_path)
    if link is not None:
        raise SessionStoreError(describe_link(link))
    remember(choices, config.storage_dir)
    entries = describe_lanes(plan)
    box = open_black_box(origin, choose_capacity())
    folder, journal = _open_journal(config, origin, run_path, entries, box, awaits_run=awaits_run)
    takers = sum(Capability.ARTIFACTS in choice.definition.capabilities for choice in choices)
    payloads = _place_payloads(primary, origin, folder, takers)
    place = run_path if folder is None else folder.path
    log = BatchLog(
        journal=journal,
        box=box,
        journal_capacity_bytes=settings.journal_capacity_bytes(place),
        replay=_find_replay(primary, origin),
    )
    leases = [] if folder is None else _take_leases(folder, entries)
    lanes = []
    config = replace(config, run_path=run_path)
    for entry, choice in zip(entries, choices, strict=True):
        opened = primary if entry.primary else None
        capabilities = choice.definition.capabilities
        open_backend = _opener(choice, config, opened)
        waits = awaits_run and entry.primary
        lanes.append(
            Lane(
                entry.name,
                wait_for_run(open_backend, config.run_id, opened) if waits else open_backend,
                log.open_cursor(primary=entry.primary),
                _open_quarantine(run_path, entry, config),
                primary=entry.primary,
                idempotent=Capability.IDEMPOTENT in capabilities,
                mark=None if folder is None or _retains(opened) else folder.mark(entry.name),
                payloads=payloads if Capability.ARTIFACTS in capabilities else None,
                retry=retry or (RetryPolicy(cap_s=AWAIT_CAP_S) if waits else None),
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
        payloads=payloads,
        measure_work=_measure_work,
        on_patience=_prefer_helpers,
        on_second=on_second,
        on_beat=on_beat,
        on_gap=on_gap,
    )


def _open_quarantine(run_path: Path, entry: LaneEntry, config: BackendConfig) -> Quarantine:
    """The lane's folder for what its backend refuses; nothing is made before the first refusal."""
    return Quarantine(
        run_path / "quarantine" / lane_folder_name(entry.name),
        entry.name,
        specification=entry.specification,
        project=config.project or "",
    )


def _take_leases(folder: JournalFolder, entries: tuple[LaneEntry, ...]) -> list[Lease]:
    """One of each lane, so that no other process delivers it meanwhile."""
    leases = [folder.lease(entry.name) for entry in entries]
    for lease in leases:
        lease.take()
    return leases


def open_child_stream(
    plan: Plan,
    config: BackendConfig,
    origin: Origin,
    run_path: Path,
    *,
    awaits_run: bool = False,
    payloads_in_place: Path | None = None,
    on_gap: Callable[[Mapping[str, int]], None] | None = None,
) -> RunStream:
    """A stream of a forked process: a journal that another process delivers; not started yet.

    A child opens no backend: SQLite's locks lie in the memory of the process,
    and a fork copies what the parent held, so the child would believe in them.
    """
    entries = describe_lanes(plan)
    box = open_black_box(origin, choose_capacity())
    folder, journal = _open_journal(config, origin, run_path, entries, box, awaits_run=awaits_run)
    if folder is None:
        return RunStream(origin)
    log = BatchLog(journal=journal, box=box)
    payloads: PayloadFolder | None = None
    if payloads_in_place is not None:
        payloads = PayloadFolder(payloads_in_place)
    elif any(Capability.ARTIFACTS in choice.definition.capabilities for choice in plan.choices):
        payloads = PayloadFolder(folder.path)
    return RunStream(origin, log, folder=folder, black_box=box, payloads=payloads, on_gap=on_gap)


def open_lane(
    manifest: Manifest, entry: LaneEntry, registry: BackendRegistry | None = None
) -> tuple[Backend, bool]:
    """Open the backend of a lane that a process left behind; for `sync_folder`.

    Returns the backend, and whether a batch may be sent to it twice.

    Raises:
        UnknownBackendError: The backend is not installed here.
        BackendUnavailable: This user has not chosen it; see `chosen_backends`.
        Exception: Whatever the backend raises when it cannot be opened.
    """
    choice, is_noted = find_chosen(
        entry.specification, Path(manifest.storage_dir), registry or default_registry()
    )
    return _open_choice(manifest, entry, choice, is_noted=is_noted)


def make_lane_opener(chosen: Sequence[BackendChoice]) -> OpenLane:
    """What opens the lanes of a run's own backends as the user wrote them, secrets included.

    Journals do not keep those. Other lanes are opened as by `open_lane`.
    """
    choices = {redact_text(choice.specification): choice for choice in chosen}

    def open_it(manifest: Manifest, entry: LaneEntry) -> tuple[Backend, bool]:
        choice = choices.get(entry.specification)
        if choice is None:
            return open_lane(manifest, entry)
        return _open_choice(manifest, entry, choice)

    return open_it


def _open_choice(
    manifest: Manifest, entry: LaneEntry, choice: BackendChoice, *, is_noted: bool = False
) -> tuple[Backend, bool]:
    config = replace(
        choice.configure(
            Path(manifest.storage_dir), run_id=manifest.run_id, project=manifest.project
        ),
        run_path=Path(manifest.run_path),
        is_noted=is_noted,
    )
    # Backends keep files of their own in there; journals are looked at one by one.
    link = find_foreign_link(Path(manifest.run_path), without=("journal",))
    if link is not None:
        raise BackendUnavailable(describe_link(link), backend=entry.name)
    backend = _open_written(choice.definition, config)
    if manifest.awaits_run and entry.primary:
        check_run_is_there(backend, manifest.run_id)
    return backend, Capability.IDEMPOTENT in choice.definition.capabilities


def find_payload_directory(primary: SupportsPrimary | None, run_id: str | None) -> Path | None:
    """Where a run's payloads are put in place, or None where they are sent."""
    backend: object = primary
    if run_id is None or not isinstance(backend, SupportsArtifacts):
        return None
    return backend.payload_directory(run_id)


def _place_payloads(
    primary: SupportsPrimary | None, origin: Origin, folder: JournalFolder | None, takers: int
) -> PayloadFolder | None:
    """Where this process puts payloads: where the primary keeps them, or in the journal."""
    in_place = find_payload_directory(primary, origin.run_id)
    if in_place is not None:
        return PayloadFolder(in_place)
    if not takers or folder is None:
        return None
    return PayloadSpool(folder.path, takers)


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


def describe_lanes(plan: Plan) -> tuple[LaneEntry, ...]:
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
    *,
    awaits_run: bool,
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
        awaits_run=awaits_run,
    )
    if box is not None:
        # Where the journal's disk fails from the start, nothing else says whose the box is.
        with contextlib.suppress(OSError):
            own = replace_field(
                manifest,
                journal=str(folder.path),
                places=(note_place(run_path), note_place(folder.path)),
            )
            JournalFolder(box.path).write_manifest(own)
    try:
        folder.write_manifest(manifest)
    except OSError as error:
        if box is None:
            _log.warning(
                "there is no journal for this run: %s cannot be made: %s", folder.path, error
            )
            return None, None
        _log.warning(
            "the journal %s cannot be made (%s); records wait in shared memory",
            folder.path,
            error,
        )

    def keep_manifest() -> None:
        moved_to = None if journal.moved_to is None else str(journal.moved_to)
        folder.keep_manifest(replace_field(manifest, moved_to=moved_to))

    journal = Journal(folder.path, origin, prepare=keep_manifest)
    return folder, journal


def _opener(
    choice: BackendChoice, config: BackendConfig, opened: Backend | None
) -> Callable[[], Backend]:
    its_config = replace(config, location=choice.location, options=dict(choice.options))
    return lambda: opened if opened is not None else _open_written(choice.definition, its_config)


def locate_run(primary: SupportsPrimary | None, storage_dir: Path, run_id: str) -> RunLocation:
    """Where a run lies; under the storage root where there is no primary to ask."""
    if primary is not None:
        return primary.locate(run_id)
    root = storage_dir / ".quark"
    return RunLocation(store_root=root, db_path=None, run_path=str(root / "runs" / run_id))


def find_local_path(primary: object, storage_dir: Path, run_id: str, noted: str = "") -> Path:
    """Where this machine keeps a run's own files; also where the run's store is elsewhere.

    Args:
        primary: The run's store, or what else reads it.
        storage_dir: The storage root.
        run_id: The run.
        noted: Where the run has noted that it lies, for a reader that cannot be asked.
    """
    # A store may have been moved since the run noted where it lies, so that it is asked first.
    place = primary.locate(run_id).run_path if isinstance(primary, SupportsPrimary) else noted
    own = storage_dir / ".quark" / "runs" / run_id
    if not place or "://" in place:
        return own
    # What a run has noted may be anybody's; what a store of this process says is believed.
    if not isinstance(primary, SupportsPrimary) and storage_dir not in Path(place).parents:
        return own
    return Path(place)


def _open_written(definition: BackendDefinition, config: BackendConfig) -> Backend:
    """Open a backend that a run is written to, where its definition wants it."""
    require_libraries(definition)
    if definition.own_process and settings.uses_helpers():
        with importing():
            from quark_core.hosting.hosted_backend import can_be_hosted, open_hosted

        if can_be_hosted(definition, config):
            # What it declares is checked where it is opened.
            return open_hosted(definition, config)
    return _open(definition, config)


def _measure_work() -> float:
    from quark_core.hosting.child_process import measure_work

    return measure_work()


def _prefer_helpers() -> None:
    from quark_core.hosting.child_process import prefer_helpers

    prefer_helpers()


def _open(definition: BackendDefinition, config: BackendConfig) -> Backend:
    require_libraries(definition)
    return check_capabilities(definition, definition.open(config))
