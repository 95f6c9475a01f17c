"""Says once that a resumed run repeats steps, and what becomes of the earlier points."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quark_core.backends.contract import Batch, SupportsRead, SupportsSearch
from quark_core.backends.run_summary import MetricSummary
from quark_core.errors import QuarkError
from quark_core.records import MetricRecord
from quark_core.records.names import decode_name
from quark_core.runs.open_run import OpenRun
from quark_core.runs.primary_reach import PrimaryReach

_log = logging.getLogger("quark")


def find_reached_steps(reach: PrimaryReach, run_id: str) -> dict[str, int]:
    """Metric -> the step at which a run has it last; empty where the store cannot say at once."""
    primary = reach.primary
    if primary is None:
        return {}
    try:
        metrics = reach.ask(lambda: _load_metrics(primary, run_id))
    except QuarkError as error:
        _log.debug("which steps run %s has reached is not known: %s", run_id, error)
        return {}
    steps = ((key, metrics[key].last_step) for key in metrics)
    return {key: step for key, step in steps if step is not None}


def _load_metrics(reader: SupportsRead, run_id: str) -> Mapping[str, MetricSummary]:
    """The metrics of a run, where they are known without reading its points."""
    return reader.summarize(run_id).metrics if isinstance(reader, SupportsSearch) else {}


def watch_for_repeated_steps(run: OpenRun, reached: Mapping[str, int]) -> None:
    """Tell of the first step that a run repeats; called before it logs anything.

    Args:
        run: The run, whose new attempt does not say from which step it goes on.
        reached: The last step of each metric before that.
    """
    if not reached:
        return
    waiting = dict(reached)
    channel = run.stream.channel(MetricRecord.KIND)

    def look(batch: Batch) -> None:
        # Of each metric the first step decides, as for readers.
        body = batch.decoded
        for key, step in zip(body.to_list("metric_key"), body.to_list("step"), strict=True):
            last = waiting.get(key) if step is not None else None
            if last is None:
                continue
            if step <= last:
                _tell(run, key, step, last)
                waiting.clear()
                break
            del waiting[key]
        if not waiting:
            channel.leave(look)

    channel.listen(look)


def _tell(run: OpenRun, key: str, step: int, last: int) -> None:
    _log.warning(
        "run %s: attempt %d logs %s from step %d on, which stood at step %d before. Its points "
        "replace the earlier ones at the steps that it repeats. Those are kept: "
        "read(all_attempts=True) and `quark export --all-attempts` show them. "
        "resume_run(from_step=%d) would leave out all that came from there on.",
        run.context.run_id,
        run.context.run.attempt,
        decode_name(key),
        step,
        last,
        step,
    )
