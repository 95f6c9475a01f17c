"""What each backend of a run was given, and which outputs of analyzers it is to have.

Out of the run's journals, marks, ledger and quarantine on this machine, and its primary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quark_core.backends.contract import Batch, SupportsGenerations
from quark_core.delivery.delivery_state import lane_folder_name, read_lines
from quark_core.delivery.journal import frame_outputs, split_generation
from quark_core.delivery.journal_folder import JournalFolder, Manifest, find_folders
from quark_core.delivery.sending import Quarantine
from quark_core.delivery.sync import count_waiting
from quark_core.records import RECORD_TYPES, StreamRecord


@dataclass(slots=True, kw_only=True)
class MirrorState:
    """One backend of a run, over all of the run's writers.

    Attributes:
        backend: Name of its lane.
        specification: How to ask for it.
        primary: Whether it is the run's primary.
        state: delivered, waiting, delivering (a living process is at it) or begun (a replay
            that was broken off).
        writers: How many processes have written to it; each generation of an analyzer
            counts as one.
        batches: Batches that it was given.
        waiting: Records that are still to be delivered.
        quarantined: Records that it refused, by reason.
        unknown: Records that it may or may not have.
        reasons: Why it waits, and what is damaged.
        outputs: Kind of what analyzers find -> (records in the primary, those of them that
            it was sent or that wait for it); filled in by `note_outputs`.
    """

    backend: str
    specification: str
    primary: bool = False
    state: str = "delivered"
    writers: int = 0
    batches: int = 0
    waiting: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    reasons: list[str] = field(default_factory=list)
    outputs: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def unsent(self) -> dict[str, int]:
        """Kind -> records of analyzers that the primary has and it was never sent."""
        return {kind: has - got for kind, (has, got) in self.outputs.items() if has > got}

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return asdict(self)


def find_journals(storage_dir: Path, run_id: str) -> list[tuple[JournalFolder, Manifest]]:
    """The journals of a run that are not all delivered yet."""
    found = [(folder, folder.read_manifest()) for folder in find_folders(storage_dir, run_id)]
    return [(folder, manifest) for folder, manifest in found if manifest]


def survey_mirrors(storage_dir: Path, run_path: Path, run_id: str) -> list[MirrorState]:
    """The backends that a run was written to, the primary first; touches nothing.

    A run that had no mirror and is wholly delivered has left no trace of its
    lanes: the list is empty then.

    Args:
        storage_dir: The storage root.
        run_path: The run's directory.
        run_id: The run.
    """
    states: dict[str, MirrorState] = {}

    def find(name: str, specification: str, *, primary: bool) -> MirrorState:
        return states.setdefault(
            specification, MirrorState(backend=name, specification=specification, primary=primary)
        )

    begun = set()
    for line in read_lines(run_path):
        state = find(line.lane, line.specification, primary=line.primary)
        if line.begun:
            begun.add(line.specification)
            continue
        begun.discard(line.specification)
        state.writers += 1
        state.batches += line.batches
        state.unknown += line.unknown
    for specification in begun:
        states[specification].state = "begun"
    for folder, manifest in find_journals(storage_dir, run_id):
        for entry, waiting in zip(manifest.lanes, count_waiting(folder, manifest), strict=True):
            state = find(entry.name, entry.specification, primary=entry.primary)
            state.writers += 1
            state.batches += folder.mark(entry.name).done
            state.waiting += waiting.waiting
            if waiting.state == "held":
                state.state = "delivering"
            elif waiting.waiting and state.state != "delivering":
                state.state = "waiting"
            state.reasons += [waiting.reason] if waiting.reason else []
            state.reasons += waiting.damage
    for state in states.values():
        quarantine = run_path / "quarantine" / lane_folder_name(state.backend)
        for item in Quarantine(quarantine, state.backend).load():
            count = state.quarantined.get(item.reason, 0)
            state.quarantined[item.reason] = count + item.batch.count
    return sorted(states.values(), key=lambda state: (not state.primary, state.backend))


def load_generations(primary: object, run_id: str) -> dict[str, list[Batch]]:
    """Batches of each generation that readers see, by writer, the older ones first.

    They are those that went to the mirrors when the run was analyzed. Nothing
    of a primary that keeps no outputs.

    Raises:
        SessionStoreError: The primary cannot be read.
    """
    if not isinstance(primary, SupportsGenerations):
        return {}
    found: dict[str, dict[str, list[StreamRecord]]] = {}
    for kind in (kind for kind, each in RECORD_TYPES.items() if each.IS_ANALYSIS):
        for record in primary.read_outputs(run_id, kind).to_records():
            kinds = found.setdefault(record.writer_id, {})
            kinds.setdefault(kind, []).append(record)
    return {writer: frame_outputs(found[writer]) for writer in sorted(found, key=_place)}


def find_sent(storage_dir: Path, run_path: Path, run_id: str) -> dict[str, set[str]]:
    """Backend's specification -> generations that it was sent, or that wait for it.

    As the run's ledger and journals on this machine have it.

    Args:
        storage_dir: The storage root.
        run_path: The run's directory.
        run_id: The run.
    """
    sent: dict[str, set[str]] = {}
    for line in read_lines(run_path):
        if line.batches and not line.begun and split_generation(line.writer_id) is not None:
            sent.setdefault(line.specification, set()).add(line.writer_id)
    for _, manifest in find_journals(storage_dir, run_id):
        for entry in manifest.lanes if manifest.generation else ():
            sent.setdefault(entry.specification, set()).add(manifest.writer_id)
    return sent


def note_outputs(
    states: list[MirrorState],
    generations: Mapping[str, list[Batch]],
    sent: Mapping[str, set[str]],
) -> None:
    """Note in the state of each mirror which outputs of analyzers it was sent, of how many.

    Args:
        states: What `survey_mirrors` returned.
        generations: What `load_generations` returned.
        sent: What `find_sent` returned.
    """
    for state in states:
        if state.primary:
            continue
        known = sent.get(state.specification, set())
        for writer, batches in generations.items():
            for batch in batches:
                has, got = state.outputs.get(batch.kind, (0, 0))
                was_sent = batch.count if writer in known else 0
                state.outputs[batch.kind] = has + batch.count, got + was_sent


def _place(writer_id: str) -> tuple[int, str]:
    found = split_generation(writer_id)
    return (0, writer_id) if found is None else (found[1], found[0])
