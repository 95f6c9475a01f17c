"""The outputs of analyzers that a run's primary has, as its mirrors are to have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quark_core.backend import Batch, SupportsGenerations
from quark_core.delivery.generation_journal import frame_outputs, split_generation
from quark_core.delivery.ledger import read_lines
from quark_core.mirrors.survey import MirrorState, find_journals
from quark_core.records import ANALYSIS_TYPES, StreamRecord

__all__ = ["find_sent", "load_generations", "note_outputs"]


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
    for record_type in ANALYSIS_TYPES:
        for record in primary.read_outputs(run_id, record_type.KIND).to_records():
            kinds = found.setdefault(record.writer_id, {})
            kinds.setdefault(record_type.KIND, []).append(record)
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
