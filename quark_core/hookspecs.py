"""The hooks of Quark: the one way in which a feature or a backend joins a run.

A plugin is a module or an object whose functions carry the `hookimpl` marker. An entry point of
the group `quark.plugins` names it, or, where it declares a backend, one of `quark.backends`. The
features of Quark itself (analysis, provenance, sweeps, notifications) join runs by these hooks and
in no other way. A plugin must be cheap to import. A hook that raises is logged and passed over: a
plugin never stops a training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from quark_core.backends.contract import BackendDefinition, DeliveryReport
    from quark_core.records import ConfigSnapshot, EventRecord
    from quark_core.records.runs import RunContext
    from quark_core.runs.open_run import OpenRun, RunDraft
    from quark_core.sessions.session import TrainingSession

__all__ = ["ENTRY_POINT_GROUP", "PLUGIN_GROUP", "hookimpl"]

PROJECT_NAME = "quark"
"""The name under which pluggy knows the hooks."""

ENTRY_POINT_GROUP = "quark.backends"
"""The group of entry points that name plugins which declare a backend."""

PLUGIN_GROUP = "quark.plugins"
"""The group of entry points that name all other plugins."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
"""Marks a function of this module as a hook. Plugins do not need it."""

hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks a function of a plugin as the implementation of the hook of its name."""


@hookspec
def quark_register_backends() -> Iterable[BackendDefinition]:  # type: ignore[empty-body]
    """Declare backends. Open nothing, and import no client library."""


@hookspec
def quark_register_commands() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Declare commands: the name after `quark` -> `module:attribute` of a `click.Command`.

    The module is imported when the command is called or its help is shown. A name of Quark's own
    is left out, with a warning.
    """


@hookspec
def quark_register_views() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Declare tabs of a run's page: a name such as `energy_use` -> `module:function`.

    The function gets a reader and a run's id, and returns a table: `{"columns": [names], "rows":
    [lists of plain values]}`. Its module is imported when somebody opens the tab. It is called on
    a thread of the page's server and has 10 s.
    """


@hookspec
def quark_register_record_kinds() -> Iterable[str]:  # type: ignore[empty-body]
    """Declare modules that define types of records; each is imported before records are read.

    A type is a class of `quark_core.api.StreamRecord` with a `KIND` and a `TABLE` of its own.
    """


@hookspec
def quark_describe_config(config: object) -> object | None:
    """Read an object that somebody gave as `config`, or say where its settings come from.

    Return a mapping, a `quark_core.api.ConfigDescription`, or None where the object
    is not yours. The first answer counts. A QuarkError and SystemExit reach the caller.
    """


@hookspec
def quark_config_changed(
    before: ConfigSnapshot, after: ConfigSnapshot, given: Sequence[ConfigSnapshot], call: str
) -> ConfigSnapshot | None:
    """Add to a configuration that was changed where its new values come from.

    The first answer counts.

    Args:
        before: The configuration so far.
        after: The new one, redacted, without origins.
        given: The changes, each with the origins that `quark_describe_config` has added.
        call: The function that the program called, such as "config.update".
    """


@hookspec
def quark_register_session_methods() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Declare functions that do the work of a session's methods: method -> `module:function`.

    `TrainingSession` has the methods of Quark's own features, such as `fingerprint`, whether the
    feature is installed or not. The function gets the session and the method's arguments; its
    module is imported at the first call.
    """


@hookspec
def quark_describe_environment(session: TrainingSession) -> Mapping[str, object]:  # type: ignore[empty-body]
    """Facts of this process for the record of the run's environment, by name.

    Called in a background thread of the process that leads a run: at its start, 5 s and 60 s
    later, and at its end. Values are plain JSON. Later facts replace earlier ones.
    """


@hookspec
def quark_environment_recorded(session: TrainingSession, values: Mapping[str, object]) -> None:
    """Hear that the environment was recorded, or that it was recorded again since it changed.

    Called on the thread that asks `quark_describe_environment`; `values` are the whole record.
    """


@hookspec
def quark_run_starting(draft: RunDraft) -> None:
    """Change a run that is about to be started or resumed, or refuse it by a QuarkError.

    Return None. The configuration is read and checked; nothing is stored yet.
    """


@hookspec
def quark_run_started(context: RunContext) -> None:
    """Hear that a run was started or resumed in this process."""


@hookspec
def quark_session_opened(session: TrainingSession) -> None:
    """Join a run that was started or resumed in this process, before its first record of a step.

    Called too where an earlier run has done the configuration, and nothing is recorded.
    Keep state of your own in `session.extensions`. State that must do something before the run
    ends is a `quark_core.api.RunExtension`.
    """


@hookspec
def quark_finding_raised(run: OpenRun, event: EventRecord) -> None:
    """Hear of an alert above the severity `debug` that a writer of this process recorded.

    Called on the thread that recorded it: hand the work to a thread of your own.

    Args:
        run: The run. State of yours is in `run.extensions`, as in `session.extensions`.
        event: The record, an event `alert_raised`.
    """


@hookspec
def quark_run_settled(session: TrainingSession, status: str) -> None:
    """Do the last work for a run: its end is recorded, and its records are on their way.

    Args:
        session: The session; it takes no more records.
        status: How the run ended, such as "completed".
    """


@hookspec
def quark_run_ended(context: RunContext, report: DeliveryReport) -> None:
    """Hear that a run has ended in this process, and how many records each backend has."""


@hookspec
def quark_render_html(value: object) -> str | None:
    """Show an object of Quark in a notebook: HTML, or None where you have none for it.

    The first answer counts.
    """


@hookspec
def quark_register_fingerprints() -> Mapping[str, Callable[[Any], object]]:  # type: ignore[empty-body]
    """Declare how values of your types are fingerprinted: `module.Class` -> a function.

    Called when the first value of an unknown type comes, so that nothing is loaded before. The
    function gets the value and returns its content: bytes, numbers, texts, arrays, or containers
    of them. It must not change the value, and may raise.
    """


@hookspec
def quark_register_samplers() -> Mapping[str, Callable[[Mapping[str, Any], int], object]]:  # type: ignore[empty-body]
    """Declare search methods for sweeps: a name, as in `search=` -> a function.

    Called when a sweep asks for a name that Quark does not know, so that nothing is loaded before.
    The function gets the sweep's definition and a seed, and returns a sampler of Optuna, a pruner,
    or a pair of both. It is called anew for each trial with another seed, so it must learn of
    earlier trials from Optuna's study. Quark's own names come first.
    """
