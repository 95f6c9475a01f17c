"""Chooses the backends of a run: names and URIs in, definitions and places out."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import msgspec
import xxhash
from msgspec.structs import replace as replace_field

from quark_core.artifacts.payload_folder import PayloadFolder, PayloadSpool
from quark_core.backends.contract import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
    RankPolicy,
    RunLocation,
    SupportsArtifacts,
    SupportsPrimary,
    SupportsReplay,
)
from quark_core.backends.registry import (
    BackendRegistry,
    check_capabilities,
    default_registry,
    require_libraries,
)
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.channel import choose_capacity
from quark_core.delivery.crash_buffer import BlackBox, open_black_box
from quark_core.delivery.crash_buffer_recovery import OpenLane
from quark_core.delivery.delivery_state import lane_folder_name
from quark_core.delivery.delivery_worker import (
    AWAIT_CAP_S,
    Lane,
    RetryPolicy,
    check_run_is_there,
    wait_for_run,
)
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest, journal_directory
from quark_core.delivery.segments import Origin
from quark_core.delivery.sending import Quarantine
from quark_core.delivery.stream import RunStream
from quark_core.delivery.takeover import Takeover
from quark_core.errors import (
    BackendError,
    BackendUnavailable,
    SchemaValidationError,
    SessionStoreError,
    UnknownBackendError,
)
from quark_core.hosting.protocol import refuse_hidden
from quark_core.ranks.launches import ALL_RANKS, RANK_ZERO, RankChoice, RankInfo, parse_ranks
from quark_core.system.folders import (
    describe_link,
    find_foreign_link,
    find_private_folder,
    note_place,
    read_private,
    write_private,
)
from quark_core.system.process import current_process, importing

_SPECIFICATION = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_.-]*)(?:(?P<mark>[+:])(?P<rest>.*))?")
_KEEP_NOTHING = "none"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One backend that was asked for: what, where, how it was written, and on which ranks."""

    definition: BackendDefinition
    location: str
    options: tuple[tuple[str, str], ...]
    specification: str
    ranks: RankChoice | None = None

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
    """The backends of one run on this rank; none of them is open yet.

    Attributes:
        primary: The primary store; None where it is not for this rank.
        mirrors: The others that are for this rank.
        ranks: On which ranks the primary is; None where nothing is kept on any.
    """

    primary: BackendChoice | None
    mirrors: tuple[BackendChoice, ...]
    ranks: RankChoice | None = None

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
    *,
    ranks: RankChoice | None = None,
) -> Plan:
    """Decide once which backends this rank has.

    Args:
        backends: Names or URIs of what is added, as a list or separated by
            commas; None takes QUARK_BACKENDS. "none" keeps nothing.
        rank: Place of this process; a backend that is not for this rank does
            not exist here.
        registry: Installed backends.
        ranks: The ranks of the session, where it says; a backend's own URI
            wins, then this, then what the backend declares.

    Raises:
        UnknownBackendError: A name or scheme that nothing answers to, or "none" beside others.
        BackendContractError: A named plugin that was left out, or one that is to have
            a process of its own and that no other process can find.
        SchemaValidationError: `backends` is of a wrong type, or names two primaries.
        SessionStoreError: QUARK_REQUIRE_SERVICE is set and QUARK_PERSISTENCE_URL
            is not, or the latter is the URL of nothing.
    """
    registry = registry or default_registry()
    wanted = _split(backends)
    if wanted == [_KEEP_NOTHING]:
        return Plan(None, ())
    if _KEEP_NOTHING in wanted:
        others = ", ".join(text for text in wanted if text != _KEEP_NOTHING)
        raise UnknownBackendError(
            f"backends: {_KEEP_NOTHING!r} stores nothing. Remove it, or pass {others}"
        )
    chosen = [choose_backend(text, registry) for text in wanted]
    choices = list({(c.definition.name, c.location, c.options): c for c in chosen}.values())
    primaries = [c for c in choices if Capability.PRIMARY in c.definition.capabilities]
    if len(primaries) > 1:
        names = " and ".join(choice.definition.name for choice in primaries)
        raise SchemaValidationError(f"backends: {names} are both primary stores. Pass only one")
    primary = primaries[0] if primaries else choose_primary(registry)
    mirrors = [choice for choice in choices if choice is not primary]

    kept = primary.ranks or ranks
    if kept is None and primary.definition.rank_policy is RankPolicy.ALL:
        kept = ALL_RANKS
    kept = kept or RANK_ZERO

    if settings.uses_helpers():
        for choice in choices:
            refuse_hidden(choice.definition)

    def is_here(choice: BackendChoice) -> bool:
        policy = choice.definition.rank_policy
        if choice.ranks is not None:
            return choice.ranks.includes(rank.rank)
        if policy is RankPolicy.ALL:
            return ranks is None or ranks.includes(rank.rank)
        return rank.rank == kept.leader or (
            policy is RankPolicy.SESSION and kept.includes(rank.rank)
        )

    return Plan(
        primary if kept.includes(rank.rank) else None,
        tuple(choice for choice in mirrors if is_here(choice)),
        kept,
    )


def choose_primary(registry: BackendRegistry) -> BackendChoice:
    """The store that runs go to where nobody says otherwise.

    Raises:
        SessionStoreError: QUARK_REQUIRE_SERVICE is set and QUARK_PERSISTENCE_URL
            is not, or the latter is the URL of nothing.
    """
    url = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    if url:
        try:
            return choose_backend(url, registry)
        except UnknownBackendError as error:
            shown = redact_text(url)
            raise SessionStoreError(
                f"{settings.PERSISTENCE_URL} is not a URL of a Quark server: {shown[:100]!r}. "
                f"Use http:// or https://, for example 'https://quark.example.org' ({error})"
            ) from None
    if settings.requires_service():
        raise SessionStoreError(
            f"{settings.REQUIRE_SERVICE} is set, but {settings.PERSISTENCE_URL} is not. Set it "
            "to the URL of your Quark server"
        )
    return choose_backend(registry.find_default_primary().name, registry)


def _split(backends: str | Sequence[str] | None) -> list[str]:
    if backends is None:
        backends = os.environ.get(settings.BACKENDS, "")
    if isinstance(backends, str):
        backends = backends.split(",")
    if not isinstance(backends, Sequence) or not all(isinstance(b, str) for b in backends):
        raise SchemaValidationError("backends must be a str or a sequence of str")
    return [text.strip() for text in backends if text.strip()]


def choose_backend(text: str, registry: BackendRegistry) -> BackendChoice:
    """The backend that a name or URI asks for.

    Raises:
        UnknownBackendError: Nothing installed answers to it.
        BackendContractError: A named plugin that was left out.
    """
    match = _SPECIFICATION.fullmatch(text)
    if match is None:
        raise UnknownBackendError(
            f"backends: {text!r} is neither a name nor a URI (installed: "
            f"{', '.join(map(repr, registry.names))})"
        )
    name, mark = match["name"].lower(), match["mark"]
    definition = registry.find(name)
    rest, ranks = _take_ranks(match["rest"] or "")
    if name != definition.name and mark == ":":
        # The scheme is the location's own, such as https.
        return BackendChoice(definition, f"{match['name']}:{rest}", (), text, ranks)
    if mark == "+":
        # What follows is a URI of another kind, and its other parameters are its own.
        return BackendChoice(definition, rest, (), text, ranks)
    location, _, parameters = rest.partition("?")
    options = tuple(parse_qsl(parameters, keep_blank_values=True))
    return BackendChoice(definition, location.removeprefix("//"), options, text, ranks)


def _take_ranks(rest: str) -> tuple[str, RankChoice | None]:
    """A URI without its parameter `ranks`, which is ours whatever the URI is, and its ranks."""
    location, mark, parameters = rest.partition("?")
    parts = parameters.split("&")
    found = [part for part in parts if part.startswith("ranks=")]
    if not mark or not found:
        return rest, None
    others = "&".join(part for part in parts if part not in found)
    ranks = parse_ranks(unquote_plus(found[-1].removeprefix("ranks=")), "backends: ranks")
    return f"{location}?{others}" if others else location, ranks


_log = logging.getLogger("quark")


class _Place(msgspec.Struct, frozen=True):
    """A backend as it is told from others.

    Attributes:
        backend: Its name.
        location: Its location, without secrets.
        options: Its options, sorted.
        storage_dir: What the location counts from, or "" where it is a URI or none.
    """

    backend: str
    location: str
    options: tuple[tuple[str, str], ...]
    storage_dir: str


# What this process was asked for: as it was written, secrets included.
_asked: dict[_Place, BackendChoice] = {}
_told: set[str] = set()


def remember(choices: Iterable[BackendChoice], storage_dir: Path) -> bool:
    """Note that this process was asked for backends, and for whom it runs.

    Backends that stay within the run's folder need no note.

    Args:
        choices: The backends, as the user has written them.
        storage_dir: The storage root of the runs.

    Returns:
        Whether a later process of this user will know; not where there is no home
        that can be written.
    """
    kept = True
    for choice in choices:
        if _stays_inside(choice):
            continue
        place = _find_place(choice, storage_dir)
        if place not in _asked:
            _asked[place] = choice
            kept = _write(place) and kept
    return kept


def find_chosen(
    specification: str, storage_dir: Path, registry: BackendRegistry
) -> tuple[BackendChoice, bool]:
    """The backend that a run's folder asks for, where this user has chosen it.

    Returns:
        The backend as this process was asked for it, secrets included, or as it is
        noted; and whether it is only noted.

    Raises:
        UnknownBackendError: Nothing installed answers to it.
        BackendContractError: A named plugin that was left out.
        BackendUnavailable: It was not chosen; the message says how to choose it.
    """
    choice = choose_backend(specification, registry)
    if _stays_inside(choice):
        return choice, False
    place = _find_place(choice, storage_dir)
    asked = _asked.get(place)
    if asked is not None:
        # The text as it was written; what answers to it may have been installed anew.
        return replace(asked, definition=choice.definition), False
    for named in _list_environment():
        try:
            other = choose_backend(named, registry)
            if _find_place(other, storage_dir) == place:
                return other, False
        except BackendError:
            continue
    if _is_noted(place):
        return choice, True
    import shlex

    shown = _show(specification)
    message = (
        f"The run's folder names {shown}, but neither this environment nor this user has chosen "
        "it. Nothing is sent there, and the records wait. To send them, run: quark sync "
        f"{shlex.quote(_show(str(storage_dir)))} --allow-backend {shlex.quote(shown)}"
    )
    if message not in _told:
        _told.add(message)
        _log.warning("%s", message)
    raise BackendUnavailable(message, backend=choice.definition.name)


def _stays_inside(choice: BackendChoice) -> bool:
    return choice.definition.stays_inside and not choice.location and not choice.options


def _list_environment() -> Iterator[str]:
    for name in (settings.PERSISTENCE_URL, settings.BACKENDS):
        for text in os.environ.get(name, "").split(","):
            if text.strip():
                yield text.strip()


def _find_place(choice: BackendChoice, storage_dir: Path) -> _Place:
    """What tells a choice from others, without secrets: so it stands in folders."""
    location = redact_text(choice.location)
    is_uri = "://" in location
    if is_uri:
        location = _normalize(location)
    options = sorted(
        (name, redact_text(f"?{name}={value}").removeprefix(f"?{name}="))
        for name, value in choice.options
    )
    counts_from = "" if is_uri or not (location or options) else str(storage_dir.resolve())
    return _Place(choice.definition.name, location, tuple(options), counts_from)


def _normalize(location: str) -> str:
    """A URI with what makes no difference spelled one way."""
    try:
        parts = urlsplit(location)
        netloc = parts.netloc.lower() if "@" not in parts.netloc else parts.netloc
        return parts._replace(
            scheme=parts.scheme.lower(), netloc=netloc, path=parts.path.rstrip("/")
        ).geturl()
    except ValueError:
        return location


def _find_note(place: _Place) -> tuple[Path, bytes] | None:
    directory = find_private_folder("backends")
    if directory is None:
        return None
    encoded = msgspec.json.encode(place)
    return directory / f"{xxhash.xxh3_128_hexdigest(encoded)}.json", encoded


def _write(place: _Place) -> bool:
    """Note a place for later processes; whether that is noted now."""
    found = _find_note(place)
    if found is None:
        return False
    if _is_noted(place):
        return True
    path, encoded = found
    try:
        write_private(path, encoded)
    except OSError as error:
        _log.info("the choice of backend %s cannot be saved: %s", place.backend, error)
        return False
    return True


def _is_noted(place: _Place) -> bool:
    found = _find_note(place)
    if found is None:
        return False
    path, encoded = found
    return read_private(path) == encoded


def _show(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def open_primary(
    choice: BackendChoice, config: BackendConfig, *, written: bool = False
) -> SupportsPrimary:
    """Open a primary store and hold it to what it declares, by BackendContractError.

    Args:
        choice: The backend.
        config: What it is opened with.
        written: Whether a run is written to it: in a helper process, unless it says no.

    Raises:
        SessionStoreError: It cannot be opened.
    """
    _check_primary(choice)
    backend = (_open_written if written else _open)(choice.definition, config)
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
    does = f"add it with backends={shown!r}"
    if Capability.READ in definition.capabilities:
        does += f", read its runs with quark.open_run({shown!r}, run_id)"
    raise SessionStoreError(
        f"backend {definition.name} ({shown}) is not a primary store: {does}. "
        f"{settings.PERSISTENCE_URL} must be the URL of a Quark server"
    )


def open_reader(
    storage_dir: Path,
    *,
    specification: str | None = None,
    run_id: str | None = None,
    takes_over: bool = True,
) -> SupportsPrimary:
    """Open the primary store of a storage root for reading only.

    Args:
        storage_dir: The storage root.
        specification: How to ask for the store, in place of what the environment says.
        run_id: The run that is to be read, or the beginning of its id, where that is known.
        takes_over: Whether what processes that are gone have left is brought there first.

    Raises:
        SessionStoreError: There is no store, or it cannot be read.
    """
    registry = default_registry()
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
    # One of each lane, so that no other process delivers it meanwhile.
    leases = [] if folder is None else [folder.lease(entry.name) for entry in entries]
    for lease in leases:
        lease.take()
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


def open_lane(manifest: Manifest, entry: LaneEntry) -> tuple[Backend, bool]:
    """Open the backend of a lane that a process left behind; for `sync_folder`.

    Returns the backend, and whether a batch may be sent to it twice.

    Raises:
        UnknownBackendError: The backend is not installed here.
        BackendUnavailable: This user has not chosen it; see `chosen_backends`.
        Exception: Whatever the backend raises when it cannot be opened.
    """
    choice, is_noted = find_chosen(
        entry.specification, Path(manifest.storage_dir), default_registry()
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
            _log.warning("this run has no journal: %s cannot be created: %s", folder.path, error)
            return None, None
        _log.warning(
            "the journal %s cannot be created (%s); records wait in shared memory",
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
