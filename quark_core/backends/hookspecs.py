"""The hooks through which plugins declare backends and hear of runs.

A plugin is a module or an object, named by an entry point of the group
`quark.backends`, whose functions carry the `hookimpl` marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from quark_core.backends.contract import BackendDefinition
    from quark_core.backends.delivery_report import DeliveryReport
    from quark_core.records.runs import RunContext

__all__ = ["ENTRY_POINT_GROUP", "PROJECT_NAME", "hookimpl", "hookspec"]

PROJECT_NAME = "quark"
ENTRY_POINT_GROUP = "quark.backends"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def quark_register_backends() -> Iterable[BackendDefinition]:  # type: ignore[empty-body]
    """Declare backends. Must be cheap: open nothing, import no client library."""


@hookspec
def quark_run_started(context: RunContext) -> None:
    """Hear that a run was started or resumed in this process."""


@hookspec
def quark_run_ended(context: RunContext, report: DeliveryReport) -> None:
    """Hear that a run has ended in this process, and what was delivered where."""


@hookspec
def quark_register_fingerprints() -> Mapping[str, Callable[[Any], object]]:  # type: ignore[empty-body]
    """Tell how values of your types are fingerprinted: `module.Class` -> what takes one apart.

    Called when the first value comes that Quark does not know, so that nothing is loaded before.
    The function gets the value, and returns what says what it is: bytes, numbers, texts, arrays,
    or containers of them. It must not change the value, and may raise.
    """


@hookspec
def quark_register_samplers() -> Mapping[str, Callable[[Mapping[str, Any], int], object]]:  # type: ignore[empty-body]
    """Tell how sweeps search by your methods: a name, as `search=` has it -> what makes one.

    Called when a sweep asks for a name that Quark does not know, so that nothing is loaded before.
    The function gets the sweep's definition and a seed, and returns a sampler of Optuna, a pruner,
    or a pair of both. It is called anew for each trial, with another seed each time, so what it
    knows of earlier trials must come from Optuna's study. Names of Quark's own are never asked for.
    """
