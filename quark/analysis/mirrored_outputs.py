"""Passes what analyzers found on to the run's mirrors, once the primary has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from quark_core.config import settings
from quark_core.delivery.journal import frame_outputs, journal_outputs
from quark_core.delivery.journal_folder import LaneEntry, journal_directory
from quark_core.ranks.launches import RankInfo
from quark_core.records import StreamRecord
from quark_core.runs import backend_choice
from quark_core.runs.output_delivery import deliver_outputs, list_remembered_lanes
from quark_core.runs.run_reader import RunReader

_log = logging.getLogger("quark")


class GatheredOutputs:
    """Outputs of runs that have ended, on their way to the mirrors; see `gather_outputs`."""

    def __init__(self) -> None:
        self._runs: dict[Path, RunReader] = {}

    def add(self, run: RunReader, run_path: Path) -> None:
        """Note that outputs of a run are journaled."""
        self._runs[run_path] = run

    def deliver(self, timeout_s: float) -> None:
        """Deliver them, and say on the log what still waits.

        Args:
            timeout_s: How long to wait for each run.
        """
        for run_path, run in self._runs.items():
            _deliver(run, run_path, timeout_s)
        self._runs.clear()


_gathered: ContextVar[GatheredOutputs | None] = ContextVar("_gathered", default=None)


@contextmanager
def gather_outputs() -> Iterator[GatheredOutputs]:
    """Within it, outputs of runs that have ended are not delivered until that is asked for."""
    gathered = GatheredOutputs()
    token = _gathered.set(gathered)
    try:
        yield gathered
    finally:
        _gathered.reset(token)


def mirror_outputs(run: RunReader, outputs: Mapping[str, Sequence[StreamRecord]]) -> None:
    """Journal one generation for the run's mirrors, and have it delivered.

    Of a run that is open in this process, that process's own threads deliver
    it, and nothing is waited for. Of one that has ended, this waits for
    QUARK_EXIT_TIMEOUT_SECONDS (10) at most; what waits longer stays for
    `quark sync`. Of one that another process has open, that one delivers it.
    Where the run has no mirrors, or this is not the rank that leads it,
    nothing is done. Never raises: the outputs are in the primary.

    Args:
        run: The run.
        outputs: Records by kind, under the identity that a store returns them with.
    """
    leads = run.held is None or run.held.leads
    if not leads or not any(outputs.values()):
        return
    try:
        _mirror(run, outputs)
    except Exception as error:  # noqa: BLE001 - a mirror must not fail an analysis
        _log.warning(
            "run %s: what was found does not reach the run's mirrors (%s); "
            "once that is mended: quark mirror replay %s",
            run.context.run_id,
            error,
            run.context.run_id,
        )


def _find_mirrors(run: RunReader, run_path: Path) -> tuple[LaneEntry, ...]:
    """The mirrors of a run: of its context, else those that its process has written to.

    Args:
        run: The run.
        run_path: Its directory on this machine, where its ledger and journals lie.
    """
    context = run.context
    if context.backends and not context.read_only:
        # The run's first rank has all of its backends, whichever rank this process is.
        plan = backend_choice.plan_backends(list(context.backends), RankInfo())
        entries = backend_choice.describe_lanes(plan)
    else:
        entries = list_remembered_lanes(run_path, context.run_id or "")
    return tuple(entry for entry in entries if not entry.primary)


def _mirror(run: RunReader, outputs: Mapping[str, Sequence[StreamRecord]]) -> None:
    context = run.context
    if len(context.backends) == 1 and not context.read_only:
        return  # the primary alone
    run_id = context.run_id or ""
    run_path = backend_choice.find_local_path(
        run.reader, context.storage_dir, run_id, context.run.run_path
    )
    lanes = _find_mirrors(run, run_path)
    if not lanes:
        return
    journal_outputs(
        journal_directory(run_path, run_id),
        frame_outputs(outputs),
        lanes,
        project=context.project_name,
        storage_dir=context.storage_dir,
        run_path=run_path,
    )
    gathered = _gathered.get()
    held = run.held
    if held is not None and held.children is not None and not held.is_over:
        held.children.poll_outputs()
    elif gathered is not None:
        gathered.add(run, run_path)
    else:
        _deliver(run, run_path, settings.exit_timeout_s())


def _deliver(run: RunReader, run_path: Path, timeout_s: float) -> None:
    run_id = run.context.run_id or ""
    children = None if run.held is None else run.held.children
    open_lane = backend_choice.open_lane if children is None else children.open_lane
    reason = deliver_outputs(journal_directory(run_path, run_id), open_lane, timeout_s)
    if reason is not None:
        _log.warning(
            "run %s: what was found is stored, but waits for the run's mirrors (%s); "
            "deliver it with: quark sync %s",
            run_id,
            reason,
            run.context.storage_dir,
        )
