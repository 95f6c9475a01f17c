"""The runs that are explained: found, opened, and what their records say of what they had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quark.analysis.comparison.results import RunReference
from quark.analysis.comparison.sides import Target, describe_side, open_target, refer_to_run
from quark.analysis.explanation.traits import RunTraits, describe_traits
from quark.analysis.run_data import RunData
from quark_core.backends.contract import StoredRun, SupportsRead
from quark_core.errors import SessionStoreError
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import Query
from quark_core.records.runs import RunContext
from quark_core.runs.reading import read_rows
from quark_core.sessions.run_config import CONFIG_READS

_MOST_FINGERPRINTS = 5_000


@dataclass(frozen=True)
class ExplainedRun:
    """One run of a side.

    Attributes:
        stored: The run as its store knows it.
        data: Its curves.
        reader: Where its records are read.
        context: Its context.
    """

    stored: StoredRun
    data: RunData
    reader: SupportsRead
    context: RunContext

    @property
    def run_id(self) -> str:
        """The run."""
        return self.data.run_id

    @cached_property
    def traits(self) -> RunTraits:
        """What it was made of."""
        return describe_traits(self.stored)

    @cached_property
    def fingerprints(self) -> tuple[FingerprintRecord, ...]:
        """What it noted of code, data, outputs and environment, the newest of it."""
        query = Query(limit=_MOST_FINGERPRINTS)
        found = read_rows(self.reader, self.run_id, FingerprintRecord.KIND, query).to_records()
        return tuple(record for record in found if isinstance(record, FingerprintRecord))

    @cached_property
    def read_keys(self) -> Mapping[str, bool] | None:
        """Key of the configuration -> whether it was read; None where nobody knows.

        Of a launch of several processes, and of a run that was resumed, one process's reads
        are not all of them.
        """
        said = [
            record
            for record in self.fingerprints
            if (record.subject, record.key) == ("environment", CONFIG_READS)
        ]
        world_size = self.traits.values.get(("launch", "launch.world_size"), 1)
        if len(said) != 1 or self.stored.run.attempt or world_size != 1:
            return None
        metadata: Mapping[str, Any] = said[0].metadata or {}
        read, known = metadata.get("read"), metadata.get("known")
        if not isinstance(read, Sequence) or not isinstance(known, Sequence):
            return None
        return {str(key): key in read for key in known}


def load_runs(
    targets: Sequence[Target], root: Path | None, opened: ExitStack
) -> list[ExplainedRun]:
    """The runs of a side, each once however often it is named; `opened` closes their stores.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    found: dict[str, ExplainedRun] = {}
    for target in targets:
        run = _load(target, root, opened)
        found.setdefault(run.run_id, run)
    return list(found.values())


def _load(item: Target, root: Path | None, opened: ExitStack) -> ExplainedRun:
    target = open_target(item, root, opened)
    data, reader = target.load(), target.run.reader
    if reader is None or data.stored is None:
        raise SessionStoreError(f"run {data.run_id}: nothing of it can be read back")
    return ExplainedRun(data.stored, data, reader, target.context)


def describe_runs(runs: Sequence[ExplainedRun]) -> RunReference:
    """One side as the result shows it."""
    return describe_side(tuple(refer_to_run(run.stored, run.data, "none") for run in runs))
