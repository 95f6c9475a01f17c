"""Hints for calls that people know from another tracker: the call to make here instead.

A call that Quark does not have, and an argument that a call does not take, are answered by a
sentence. Nothing of this costs anything where a call is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

if TYPE_CHECKING:
    import inspect

NOT_GIVEN: Any = object()
"""The default of an argument that must be given, which the call itself says."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_LOG = 'metrics = quark.MetricsLogger(session) once, then metrics.log("loss", value, step=step)'
_LOG_HERE = 'metrics.log("loss", value, step=step), or metrics.log({"loss": value}, step=step)'
_START = 'session = quark.start_run(project="digits", config={"lr": 1e-3})'
_CONFIG = (
    'quark.start_run(project=…, config={"lr": 1e-3}), or session.config.update({"lr": 1e-3}) later'
)
_ARTIFACT = (
    "artifacts = quark.ArtifactStore(session) once, then artifacts.log_file(path), "
    "artifacts.log_image(name, image) or artifacts.log_table(name, rows)"
)
_END = "session.end_run(), or leave the block `with quark.start_run(…) as session:`"
_TAG = 'session.add_tag("baseline"), or session.annotate(gpu="V100") for a name with a value'
_NOTE = 'session.annotate(gpu="V100", accuracy=0.98), a field that field.gpu finds'
_GROUP = 'quark.start_run(group="paper/fig3"), or session.add_to_group("paper/fig3") later'
_WATCH = "quark.watch(session, model, optimizer)"
_READ = 'quark.search_runs(…), quark.open_run(run_id), quark.series(session, "loss")'
_ALERT = (
    'quark.EventLogger(session).log("alert_raised", severity="error", '
    'payload={"title": "Slow", "message": "the loader waits"})'
)
_CODE = "quark.read_sources(session), which returns the source snapshot of the run"
_USE = 'session.use_artifact("model:best")'
_TEXT = 'session.add_log("text"), or handler = quark.LoggingHandler(session)'


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Each name -> what to write in its place, of a table of what to write -> names."""
    return {name: written for written, names in table.items() for name in names.split()}


_RENAME = 'quark.start_run(name="…"), or quark.edit_run(session, name="…") later'
_NOTES = 'quark.start_run(notes="…"), or quark.edit_run(session, notes="…") later'
_OBJECTIVE = 'quark.start_run(objective="val/loss", mode="min")'

_SESSION = _by_name(
    {
        _LOG: "log log_metric log_metrics track report_scalar add_scalar append log_dict "
        "add_scalars log_scalar",
        _CONFIG: "log_param log_params log_parameter log_parameters log_hparams log_hyperparams "
        "add_hparams connect set_params hparams log_arguments",
        _ARTIFACT: "log_artifact log_artifacts log_image log_figure log_asset save upload "
        "upload_artifact add_image log_table log_model log_file add_figure log_histogram "
        "add_histogram log_confusion_matrix report_image upload_file",
        _END: "finish end stop close terminate finalize",
        _TAG: "set_tag set_tags add_tags log_tag tag tags",
        _TEXT: "log_text add_text print report_text",
        _NOTE: "log_metadata set_metadata add_metadata log_other log_others",
        _GROUP: "set_group add_group set_groups group groups",
        _WATCH: "watch watch_model",
        _NOTES: "notes add_notes",
        _ALERT: "alert",
        _CODE: "log_code",
        _OBJECTIVE: "define_metric",
        _READ: "history",
        _RENAME: "set_name",
        'session.fingerprint_data("train", values)': "log_input",
        ("session.annotate(best=0.98); Quark keeps last, min and max of metrics"): "summary",
    }
)

_WRITER = {
    **{
        name: _SESSION[name]
        for name in (
            "alert define_metric log_artifact log_code log_param log_params save set_tag set_tags "
            "summary watch"
        ).split()
    },
    **_by_name(
        {
            _LOG_HERE: "log_metric log_metrics add_scalar add_scalars track report_scalar "
            "log_scalar log_dict",
            _END: "finish end end_run",
            _CONFIG: "config",
            _USE: "use_artifact",
        }
    ),
}

_MODULE = {
    **_SESSION,
    **_by_name(
        {
            _START: "init init_run start Run Task Experiment SummaryWriter set_experiment "
            "create_run login run set_tracking_uri Logger",
            _ARTIFACT: "Image Artifact Table Histogram Video Audio",
            _CONFIG: "config",
            _READ: "Api Client get_run active_run get_metric_history runs",
            _USE: "use_artifact",
            "sweep = quark.sweep(…), and sweep.run(train)": "agent",
            'artifacts.log_file(path, artifact_type="model", aliases=["best"])': "register_model",
            "quark.watch(session, model, optimizer), or the callback of your framework": "autolog",
        }
    ),
}
del _MODULE["log_histogram"]

_TABLES: Mapping[str, Mapping[str, str]] = {"module": _MODULE, "session": _SESSION}

# Arguments as other trackers call them.
_ARGUMENTS = _by_name(
    {
        "project": "experiment experiment_name project_name experiment_id experiment_names",
        "name": "run_name display_name task_name",
        "config": "params hparams",
        "storage_dir": "dir log_dir logdir",
        "where": "filter_string filters",
        "limit": "max_results",
        "parent_run_id": "parent",
        "run_id": "id",
        "tags": "job_type",
        "notes": "description",
        "step": "global_step iteration",
        "metric": "key tag title",
        ("QUARK_PERSISTENCE_URL names the server, and a key the workspace"): "entity",
        "parent_run_id=outer.run_id makes a run the child of another one": "nested",
        "Quark assigns the ID of a new run. quark.resume_run(run_id=…) continues a run": "run_id",
        "quark.resume_run(run_id=…) continues a run": "resume",
        "no account is needed": "anonymous",
        "Quark stores the source code automatically": "save_code",
        "settings are environment variables named QUARK_…": "settings",
        "each start_run starts a new run": "reinit",
        "each call is kept at once": "commit sync",
    }
)


def explain_attribute(owner: object, name: str, table: str, shown: str) -> AttributeError:
    """The error of an attribute that is not there, with what to write where it is a habit.

    Args:
        owner: What was asked.
        name: The attribute.
        table: Which habits apply: "module" or "session".
        shown: How the message names the owner.
    """
    message = f"{shown} has no attribute {name!r}"
    known = _TABLES[table].get(name)
    if known is not None:
        message = f"{message}. Write {known}"
    return AttributeError(message, name=name, obj=owner)


def explain_item(key: object) -> TypeError:
    """The error of `session[key]`, which some trackers log by."""
    return TypeError(
        f"a session is not a mapping. To log metrics, write {_LOG}. For a config value, write "
        f"session.config[{_show(key)}]"
    )


def refuse_assignments(session: type[_T]) -> type[_T]:
    """Let a class of sessions refuse what other trackers are assigned: it would be lost."""
    for name in ("group", "notes", "summary", "tags"):
        setattr(session, name, _Refused(name))
    for name, written in (("name", _MODULE["set_name"]), ("config", _CONFIG), ("groups", _GROUP)):
        read = getattr(session, name)
        setattr(session, name, read.setter(_Refused(name, written).__set__))
    return session


class _Refused:
    """An attribute that is not there, and is not put there either."""

    def __init__(self, name: str, written: str = "") -> None:
        self._name = name
        self._written = written or _SESSION[name]

    def __get__(self, owner: object, kind: type) -> NoReturn:
        raise explain_attribute(owner, self._name, "session", f"{kind.__name__!r} object")

    def __set__(self, owner: object, value: object) -> NoReturn:
        shown = f"{type(owner).__name__!r} object: {self._name!r} cannot be assigned"
        raise AttributeError(f"{shown}. Write {self._written}", name=self._name, obj=owner)


class _Habit:
    """An attribute that is not there, and says what to write.

    Not `__getattr__`: with one, every attribute of a class is looked up slowly, and a call
    that logs would cost half as much again.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: object, kind: type) -> NoReturn:
        shown = f"{kind.__name__!r} object has no attribute {self._name!r}"
        raise AttributeError(f"{shown}. Write {_WRITER[self._name]}", name=self._name, obj=owner)


def answer_habits(writer: type[_T]) -> type[_T]:
    """Let a class of writers answer calls of other trackers by a sentence; costs nothing else."""
    for name in _WRITER:
        if name not in writer.__dict__:
            setattr(writer, name, _Habit(name))
    return writer


def explain_arguments(
    function: Callable[..., Any], shown: str, surplus: tuple[Any, ...], unknown: Mapping[str, Any]
) -> TypeError:
    """The error of a call with arguments that it does not take, with what to write.

    Args:
        function: What was called.
        shown: How the message names it.
        surplus: What was given by position beyond what it takes.
        unknown: What was given by names that it does not know.
    """
    import inspect

    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD,
             each.KEYWORD_ONLY) and each.name not in ("self", "cls")]  # fmt: skip
    if unknown:
        return TypeError(_explain_name(shown, next(iter(unknown)), named))
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    first = by_name[0] if by_name else ""
    return TypeError(
        f"{shown}() got {_show(surplus[0])} by position, but takes it by name: write "
        f"{first}={_show(surplus[0])}" + (f" if it is the {first}" if first else "")
    )


def hide_refused(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show a method without what it takes only to refuse it: `*surplus`, `**unknown`, `_third`.

    It stays the function that it is, so that a call costs the same.
    """
    import inspect

    own = inspect.signature(method)
    shown = [
        each.replace(default=each.empty) if each.default is NOT_GIVEN else each
        for each in own.parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name[0] != "_"
    ]
    method.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return method


def explain_argument_errors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a method whose arguments do not fit say what to write; costs nothing where they do.

    A TypeError that comes from within the method stays as it is.
    """

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            explained = _explain_call(method, args, kwargs)
            if explained is None:
                raise
            raise explained from error.__cause__

    return call


def _explain_call(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TypeError | None:
    import inspect

    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters
        unknown = {name: value for name, value in kwargs.items() if name not in parameters}
        if unknown:
            return explain_arguments(method, method.__name__, (), unknown)
        taken = _count_positional(parameters)
        if len(args) > taken:
            free = [
                n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n not in kwargs
            ]
            if free:
                given = ", ".join(
                    f"{name}={_show(value)}"
                    for name, value in zip(free, args[taken:], strict=False)
                )
                return TypeError(
                    f"{method.__name__}() takes its arguments by name: write "
                    f"{method.__name__}({given})"
                )
        return TypeError(f"{method.__name__}(): {error}")
    return None


def _count_positional(parameters: Mapping[str, inspect.Parameter]) -> int:
    return sum(
        each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in parameters.values()
    )


def _explain_name(shown: str, name: str, named: list[str]) -> str:
    message = f"{shown}() has no argument {name!r}"
    habit = _ARGUMENTS.get(name)
    if habit not in named:
        habit = _ARGUMENTS.get(habit or "", habit)
    if habit is not None and (habit in named or " " in habit):
        return f"{message}: write {habit}=…" if habit in named else f"{message}: {habit}"
    import difflib

    near = difflib.get_close_matches(name, named, n=1)
    if near:
        return f"{message}: write {near[0]}=…"
    return f"{message}; it takes {', '.join(named)}"


def _show(value: object) -> str:
    """A value for a message; the repr of an object may be of any length, or raise."""
    if isinstance(value, (str, int, float)):
        return repr(value)[:60]
    return "…"
