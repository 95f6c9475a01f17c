"""Which of a run's metrics somebody may mean who asks for one that it does not have."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.names import decode_name, encode_name

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")

# Beyond this the comparison of names would take longer than the read that found nothing.
_MAX_COMPARED = 10_000
_MAX_LISTED = 10


def describe_unknown_metric(name: str, keys: Iterable[str]) -> str | None:
    """What to say of a metric that is not among these, with the names near it; None without any."""
    # What a search is made of is not imported for a run that nothing is searched in.
    from quark_core.search.resolution import suggest_names

    shown = decode_name(name)
    near = suggest_names(shown, map(decode_name, islice(keys, _MAX_COMPARED)))
    if not near:
        return None
    return f"has no metric {shown!r}; near it: {', '.join(map(repr, near))}"


def refuse_unknown_metric(name: str, keys: Collection[str], argument: str, whose: str) -> None:
    """Refuse a metric that is not among these: nothing can be judged by it.

    Args:
        name: The metric, as somebody has named it.
        keys: Stored keys of those there are.
        argument: What has named it.
        whose: Who does not have it, such as `the run`.

    Raises:
        SchemaValidationError: It says what there is.
    """
    if encode_name(decode_name(name)) in keys:
        return
    said = describe_unknown_metric(name, keys)
    if said is None:
        shown = ", ".join(repr(decode_name(key)) for key in islice(keys, _MAX_LISTED))
        more = f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else ""
        has = f"there are {shown}{more}" if keys else "nothing was logged there"
        said = f"has no metric {decode_name(name)!r}; {has}"
    raise SchemaValidationError(f"{argument}: {whose} {said}")


def tell_unknown_metric(run: OpenRun, key: str) -> None:
    """Warn once of a metric that was read and that the run does not have, where one is near it.

    Costs nothing more once it was looked up: a script may ask again and again for what is
    yet to be logged.

    Args:
        run: The run, flushed.
        key: The stored key.
    """
    from quark_core.runs.searching import summarize_run

    if run.reader is None or run.context.run_id is None or not run.warns_first("missed", key):
        return
    try:
        keys = summarize_run(run.reader, run.context.run_id).metrics
    except QuarkError:
        return
    if key not in keys and (said := describe_unknown_metric(key, keys)):
        _log.warning("run %s %s; nothing was read", run.context.run_id, said)
