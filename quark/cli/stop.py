"""`quark stop`: asks a training to stop, wherever it runs."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.completion import RUN
from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    find_run,
    open_store,
    print_json,
    usage_mistakes,
)
from quark_core.config.arguments import resolve_storage_dir
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsPrimary
    from quark_core.backends.run_summary import StoredRun
    from quark_core.records.runs import StopRequest

_POLL_S = 0.5
# Half a minute is three heartbeats: a training that looks has seen it by then.
_WAIT_S = 30.0


@click.command()
@takes_options
def stop(
    *,
    run: str = RUN,
    storage_dir: Path | None = STORAGE_DIR,
    reason: str | None = option("Reason, shown with the run."),
    wait_s: float = option(
        "Seconds to wait for an answer; 0 does not wait.",
        "--wait",
        least=0,
        metavar="SECONDS",
        default=_WAIT_S,
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Ask a running training process to stop.

    RUN is a run ID, unique prefix or name. The process receives the request within
    10 s. It stops if its loop checks session.stop_requested, if it was started with
    on_stop="raise", or if Lightning, Transformers or Accelerate runs the loop. No
    process is killed. On a Quark server, the key in QUARK_USER_KEY needs the scopes
    read and write.

    \b
    Exit codes:
      0    the process received the request, the run has ended, or --wait is 0
      1    the store cannot be read, or no answer came within --wait seconds
      2    usage error
    """  # noqa: D301 - click wants the character
    from quark_core.runs.run_editing import stop_run

    store = open_store(storage_dir)
    run_id = str(find_run(store, run).run.id)
    with usage_mistakes():
        request = stop_run(run_id, reason=reason, storage_dir=resolve_storage_dir(storage_dir))
    stored = _wait(store, run_id, request, wait_s)
    seen = _find_seen(stored, request)
    if as_json:
        print_json({"run_id": run_id, "state": stored.state, "stop": (seen or request).to_dict()})
    else:
        _say(stored, request, seen, wait_s, storage_dir)
    if wait_s and seen is None and stored.state in ("running", "lost"):
        raise SystemExit(1)


def _wait(store: SupportsPrimary, run_id: str, request: StopRequest, wait_s: float) -> StoredRun:
    """The run once its training knows, has gone, or the time is over."""
    deadline = time.monotonic() + wait_s
    while True:
        stored = store.load_run(run_id)
        if _find_seen(stored, request) is not None or stored.state != "running":
            return stored
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return stored
        time.sleep(min(_POLL_S, left_s))


def _find_seen(stored: StoredRun, request: StopRequest) -> StopRequest | None:
    known = stored.stop
    return known if known is not None and known.id == request.id and known.seen_at else None


def _say(
    stored: StoredRun,
    request: StopRequest,
    seen: StopRequest | None,
    wait_s: float,
    storage_dir: Path | None,
) -> None:
    where = "" if storage_dir is None else f" -d {shlex.quote(str(storage_dir))}"
    follow = f"quark show {shorten_run_id(str(stored.run.id))}{where}"
    click.echo(clean_line(f"{request.describe()}."))
    if stored.state == "lost":
        click.echo(f"But the run is lost: {stored.lost_reason}.")
    elif stored.state != "running":
        click.echo(f"The run has ended: {stored.state}.")
    elif seen is not None:
        click.echo(
            "The process received the request. It stops when its loop checks "
            f'session.stop_requested, with on_stop="raise", or in a framework\'s loop: {follow}'
        )
    elif wait_s:
        click.echo(
            f"No answer from the training process within {wait_s:g} s. It may be stuck, or cannot "
            "reach the store. The request stays active. To end the process now, press Ctrl-C or "
            "send SIGTERM on its machine."
        )
    else:
        click.echo(f"The process receives the request within 10 s: {follow}")
