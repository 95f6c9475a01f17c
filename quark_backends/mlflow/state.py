"""What the mirror remembers on this machine, below the run's directory.

    mirrors/mlflow/<hash of the tracking URI>/
        run.json            which MLflow run it is, and what it was started with
        names.json          keys and their names in MLflow
        writers/<id>.json   how far each writer is acknowledged
        outbox/             files that will be among the run's artifacts, by their path there;
                            removed when the mirror is closed and they are
        uploaded/           the same paths: which state of each file is there
        making              is there while the MLflow run is looked for and made
        staged/             payloads whose record has not come yet

Each writer belongs to one process, so no two processes write one of those. Nothing
is synced: what a power cut takes is sent again, and found to be there.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.mirroring.saved_state import load_state, make_file_name, save_state
from quark_backends.mlflow.points import TimeRange
from quark_core.api import ProcessIdentity, current_process, is_alive

# Longer than the calls take within their bounds.
_CLAIM_S = 120.0


class RunState(msgspec.Struct):
    """The MLflow run that mirrors a run, as far as it is known.

    Attributes:
        mlflow_run_id: Its id, or None before it was found or made.
        url: Address of its page, where the tracking server has one.
        attempt: Newest attempt that was seen.
        start: Data of that attempt's start, or None where none was seen.
        started_ms: When the run was started.
        config: Values of the newest configuration, or None where none was seen.
        first_writer: The writer that began the run, or None where another machine saw that.
        from_steps: Attempt -> the step that it was resumed from.
        ended: Status and time in ms with which the newest attempt ended, or None.
        shown_tags: Names of the tags in MLflow that stand for tags of the run.
    """

    mlflow_run_id: str | None = None
    url: str | None = None
    attempt: int = -1
    start: dict[str, Any] | None = None
    started_ms: int = 0
    config: dict[str, Any] | None = None
    first_writer: str | None = None
    from_steps: dict[str, int] = {}
    ended: tuple[str, int] | None = None
    shown_tags: list[str] = []


class MlflowWriter(msgspec.Struct):
    """How far a writer is acknowledged.

    Attributes:
        head: Number of its newest batch that is.
        digest: Hash of that batch.
        partial: Number of a batch of which a part is.
        offset: How many records of it.
        recent: Times that points of its next batch might meet; see `make_points`.
        events: Severity -> how many events it has sent.
        missing: Kind -> how many records it says are missing.
        events_file, events_bytes: Number and length of its newest file of events; 0 for none.
        gaps: First and last number of batches before the newest that MLflow has not: it has
            refused them, and may take them another time.
    """

    head: int = -1
    digest: str = ""
    partial: int = -1
    offset: int = 0
    recent: list[TimeRange] = []
    events: dict[str, int] = {}
    missing: dict[str, int] = {}
    events_file: int = 0
    events_bytes: int = 0
    gaps: list[tuple[int, int]] = []

    def has_gap(self, number: int) -> bool:
        """Whether a batch before the newest is not there."""
        return any(first <= number <= last for first, last in self.gaps)

    def list_gaps_without(self, number: int) -> list[tuple[int, int]]:
        """The gaps when a batch has come that is newer than all, or was in one of them."""
        if number > self.head:
            return [*self.gaps, *([(self.head + 1, number - 1)] if number > self.head + 1 else [])]
        parts = (
            part
            for first, last in self.gaps
            for part in (
                [(first, number - 1), (number + 1, last)]
                if first <= number <= last
                else [(first, last)]
            )
        )
        return [(first, last) for first, last in parts if first <= last]


class MlflowFolder:
    """The files of one mirror of one run.

    Args:
        folder: The run's folder for this kind of mirror.
        uri: The tracking URI; a run may be mirrored to several.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder / hashlib.sha256(uri.encode("utf-8", "replace")).hexdigest()[:12]
        self._writers: dict[str, MlflowWriter] = {}

    def load_run(self) -> RunState:
        """The run as it was last saved; a new one where there is none."""
        return load_state(self.folder / "run.json", RunState)

    def save_run(self, run: RunState) -> None:
        """Keep the run."""
        save_state(self.folder / "run.json", run)

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Whether the caller alone may look for the run and make it, until it leaves.

        Two mirrors of one run, in one process or in several of this machine,
        would both find none and both make one.
        """
        path = self.folder / "making"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            with suppress(FileNotFoundError):
                if _is_given_up(path):
                    path.unlink()  # who made it has died; the next try has it
            yield False
            return
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(current_process()))
            yield True
        finally:
            path.unlink(missing_ok=True)

    def load_writer(self, writer_id: str) -> MlflowWriter:
        """The writer as it was last saved; a new one where there is none."""
        found = self._writers.get(writer_id)
        if found is None:
            found = self._writers[writer_id] = load_state(self._path_of(writer_id), MlflowWriter)
        return found

    def save_writer(self, writer_id: str, writer: MlflowWriter) -> None:
        """Keep how far a writer is."""
        self._writers.pop(writer_id, None)
        save_state(self._path_of(writer_id), writer)
        self._writers[writer_id] = writer

    def _path_of(self, writer_id: str) -> Path:
        return self.folder / "writers" / f"{make_file_name(writer_id)}.json"


def _is_given_up(path: Path) -> bool:
    """Whether a claim is of a process that has died, or is older than the calls may take."""
    try:
        owner = msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except msgspec.DecodeError:
        owner = None  # torn, or made a moment ago
    alive = None if owner is None else is_alive(owner)
    return alive is False or abs(time.time() - path.stat().st_mtime) > _CLAIM_S
