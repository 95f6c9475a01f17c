"""Opens and ends the W&B run that mirrors a run. For the mirror's own process only."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quark_backends.mirroring.tags import split_tag
from quark_backends.wandb.process import OpenRun
from quark_backends.wandb.rows import AXES
from quark_backends.wandb.state import WandbState
from quark_core.api import BackendUnauthorized, BackendUnavailable, lower_started, redact_text

FLUSH_INTERVAL_S = 0.02
"""How often W&B writes its file: the mirror waits for that at each batch."""

_INIT_TIMEOUT_S = 20.0
_MAX_TAG_LENGTH = 64
_MAX_ID_LENGTH = 120
_MAX_SUFFIX = 10
_BAD_ID = re.compile(r"[:;,#?/'\\%\s]")
_INTERRUPTED = {"": 130, "SIGINT": 130, "SIGTERM": 143}


def make_wandb_id(run_id: str) -> str:
    """A run's id as W&B takes it: itself, wherever W&B allows that."""
    kept = _BAD_ID.sub("-", run_id)
    if kept == run_id and len(run_id) <= _MAX_ID_LENGTH:
        return run_id
    return f"{kept[:100]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def init_run(wandb: Any, opening: OpenRun, state: WandbState) -> Any:
    """Start or continue the W&B run, and note its id.

    Raises:
        BackendUnauthorized: W&B has no valid credentials.
        BackendUnavailable: W&B's server does not answer in time, or refuses.
    """
    wandb_id = make_wandb_id(opening.run_id)
    # The folder may be somebody's who means another of the user's runs.
    if re.fullmatch(rf"{re.escape(wandb_id)}(?:-r[0-9]+)?", state.wandb_id):
        wandb_id = state.wandb_id
    for number in range(2, _MAX_SUFFIX):
        try:
            run = _init(wandb, opening, state, wandb_id)
        except Exception as error:
            if "deleted" in str(error) and "previously" in str(error):
                # W&B never gives the id of a deleted run again.
                wandb_id = f"{make_wandb_id(opening.run_id)}-r{number}"
                continue
            raise _translate(wandb, error) from error
        state.wandb_id = wandb_id
        lower_started()  # W&B's own process, which does about half of the work
        for key in AXES:
            run.define_metric(key, hidden=True, summary="none")
        define_steps(run, state)
        native = state.steps != "counted"
        for pattern, kind in (("layers/*", "layer"), ("params_stats/*", "parameter")):
            axis = f"quark/{kind}_step" if native else "quark/step"
            run.define_metric(pattern, step_metric=axis, step_sync=False, hidden=True)
        return run
    raise BackendUnavailable(
        f"the W&B runs {opening.run_id} to {wandb_id} were all deleted", backend="wandb"
    )


def define_steps(run: Any, state: WandbState) -> None:
    """Give metrics the axis `quark/step` where W&B's own step is not the run's."""
    if state.steps == "own":
        return
    # Otherwise W&B would add the newest step to rows that have none.
    run.define_metric("*", step_metric="quark/step", step_sync=False)
    for key in state.metric_keys:
        with contextlib.suppress(Exception):  # a star in the middle, which W&B refuses
            run.define_metric(key, step_metric="quark/step", step_sync=False)


def describe_start(opening: OpenRun, state: WandbState) -> dict[str, Any]:
    """What the start of a run says about its W&B run: name, notes, tags, group and job type."""
    run: Mapping[str, Any] = state.start.get("run", {})
    tags = dict.fromkeys([*run.get("tags", ()), *state.tags, *opening.options.tags])
    lineage = run.get("lineage_root_run_id")
    named = dict(map(split_tag, tags))
    groups: Sequence[str] = run.get("groups") or ()
    group = opening.options.group or named.get("group") or next(iter(groups), None)
    if group is None and lineage not in (None, opening.run_id):
        group = lineage
    return {
        "name": run.get("name"),
        "notes": run.get("notes"),
        "tags": [
            tag[:_MAX_TAG_LENGTH] for tag in (*tags, *(f"group:{path}" for path in groups)) if tag
        ],
        "group": group,
        "job_type": opening.options.job_type or named.get("job_type") or None,
    }


def note_page(state: WandbState, run: Any) -> None:
    """Note where a W&B run is to be seen; one that is offline has no page yet."""
    url = None if run.offline else getattr(run, "url", None)
    if isinstance(url, str) and url:
        # Of an anonymous user, what stands behind the question mark is a key.
        state.url = url.partition("?")[0]
        state.entity = str(getattr(run, "entity", None) or "")


def find_exit_code(state: WandbState) -> int:
    """The exit code by which W&B tells how a run ended; 1 where its end was never seen."""
    if state.exit_code and state.status != "completed":
        return state.exit_code
    if state.status == "interrupted":
        return _INTERRUPTED.get(state.signal, 130)
    return 0 if state.status == "completed" else 1


def _init(wandb: Any, opening: OpenRun, state: WandbState, wandb_id: str) -> Any:
    options = opening.options
    Path(opening.folder).mkdir(parents=True, exist_ok=True)
    said = describe_start(opening, state)
    with _starting(wandb, state):
        return wandb.init(
            id=wandb_id,
            project=options.project or os.environ.get("WANDB_PROJECT") or opening.project,
            entity=options.entity,
            name=said["name"],
            notes=said["notes"],
            tags=said["tags"] or None,
            group=said["group"],
            job_type=said["job_type"],
            dir=opening.folder,
            mode=options.mode,
            resume="allow",
            reinit="create_new",
            force=False,
            save_code=False,
            settings=_make_settings(wandb, opening),
        )


class _StartClock:
    """The module `time`, by whose clock it is the moment at which a run began."""

    def __init__(self, started_us: int) -> None:
        self._started_us = started_us

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return self._started_us / 1e6


@contextlib.contextmanager
def _starting(wandb: Any, state: WandbState) -> Iterator[None]:
    """Let a W&B run begin when the run began: W&B asks the clock, and takes no answer of ours."""
    # Of a later process the module `wandb_init` would name its folder as that of the first one,
    # which older versions of W&B write over.
    names = ["wandb_run"] if state.file else ["wandb_run", "wandb_init"]
    found = []
    for name in names:
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(f"{wandb.__name__}.sdk.{name}"))
    asked = [module for module in found if getattr(module, "time", None) is time]
    try:
        for module in asked if state.started_us else ():
            vars(module)["time"] = _StartClock(state.started_us)
        yield
    finally:
        for module in asked:
            vars(module)["time"] = time


def _make_settings(wandb: Any, opening: OpenRun) -> Any:
    wanted = {
        "console": "off",
        "x_disable_stats": True,
        "x_disable_meta": True,
        "disable_git": True,
        "disable_code": True,
        "disable_job_creation": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "silent": True,
        "init_timeout": _INIT_TIMEOUT_S,
        "finish_timeout": opening.finish_timeout_s,
        "x_transaction_log_flush_interval": FLUSH_INTERVAL_S,
    }
    # Those that begin with x_ come and go from version to version.
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _translate(wandb: Any, error: Exception) -> BackendUnavailable:
    text = " ".join(redact_text(str(error) or type(error).__name__).split())[:500]
    unauthorized = isinstance(error, getattr(wandb.errors, "AuthenticationError", ()))
    if unauthorized or "api_key" in text.lower() or "api key" in text.lower():
        return BackendUnauthorized(
            f"W&B has no valid credentials ({text}): run wandb login, or set WANDB_API_KEY; "
            "without an account use wandb:?mode=offline; the records wait",
            backend="wandb",
        )
    return BackendUnavailable(f"W&B cannot be reached ({text}); the records wait", backend="wandb")
