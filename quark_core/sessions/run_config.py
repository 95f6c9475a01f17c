"""A run's configuration as it is kept, for who has the session; and how it is changed later."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from quark_core.config.arguments import describe_argument
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import JsonObject
from quark_core.runs.config_reading import change_config, read_config
from quark_core.runs.open_run import OpenRun

CONFIG_CHANGED = "config_changed"
"""The type of the event that a change is told by."""

_SHOWN_KEYS = 5
_SHOWN_VALUE = 60
_JOURNAL_TIMEOUT_S = 1.0


class _Protected:
    """Refuses changes of what is nested in a configuration, which would be kept nowhere."""

    _key = ""

    def _refuse(self, *_args: object, **_named: object) -> NoReturn:
        raise TypeError(
            f"session.config[{self._key!r}] cannot be changed from within: change a copy of it "
            f"(copy.deepcopy), and write session.config[{self._key!r}] = copy"
        )

    __setitem__ = __delitem__ = __iadd__ = __ior__ = __imul__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
    append = extend = insert = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: object) -> Any:
        return _copy(self)

    def __copy__(self) -> Any:
        return _copy(self)

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (_copy(self),)


class _ProtectedDict(_Protected, dict[str, Any]):
    pass


class _ProtectedList(_Protected, list[Any]):
    pass


def _protect(value: Any, key: str) -> Any:
    made: _ProtectedDict | _ProtectedList
    if isinstance(value, dict):
        made = _ProtectedDict((name, _protect(item, key)) for name, item in value.items())
    elif isinstance(value, list):
        made = _ProtectedList(_protect(item, key) for item in value)
    else:
        return value
    made._key = key
    return made


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


class RunConfig(Mapping[str, Any]):
    """A run's configuration as its store keeps it: plain JSON values, secrets redacted.

    Always as this process knows the run now. It is changed by `update` and by
    `config[key] = value`; what it was before stays with the run. What is nested refuses to be
    changed, and `copy.deepcopy` of it may be. May be called from any thread.

    Args:
        run: The run as it is open here.
    """

    __slots__ = ("_run",)

    def __init__(self, run: OpenRun) -> None:
        self._run = run

    @property
    def _values(self) -> Mapping[str, Any]:
        config = self._run.config
        return {} if config is None else config.values

    def __getitem__(self, key: str) -> Any:
        return _protect(self._values[key], key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, config: object = None, /, **values: Any) -> None:
        """Change the configuration of a run that goes on; returns once the journal has it.

        Each top-level key takes its new value, as of `dict.update`; a nested mapping takes the
        place of the one that was there. Stores, searches (`config.lr`), the page and mirrors
        have the new values; the run gets an event `config_changed` that says what they were.
        What changes nothing does nothing. On a rank that does not lead its run, and in a forked
        child, it changes what is seen here, and nothing that is kept.

        Args:
            config: What `start_run` takes as `config`.
            values: Single keys: `config.update(lr=0.1)`.

        Raises:
            SchemaValidationError: `config` is no mapping; the message names it.
            InvalidRunStateError: The run has ended, or is open for reading only.
        """
        self.take("config.update", read_config(config), read_config(values or None))

    def take(self, call: str, *given: ConfigSnapshot) -> None:
        """Take over what was given, as `update` does; the last of several counts.

        Args:
            call: What was called, for messages.
            given: Snapshots of it.

        Raises:
            InvalidRunStateError: The run has ended, or is open for reading only.
        """
        run = self._run
        if run.refusal is not None:
            run.refuse(call)
        with run.lock:
            before = run.config or ConfigSnapshot(JsonObject())
            after = change_config(before, functools.reduce(_merge, given, before), given, call)
            changes = {
                key: {"before": before.values.get(key), "after": after.values[key]}
                for key in dict.fromkeys(key for each in given for key in each.values)
                if key not in before.values or before.values[key] != after.values[key]
            }
            if not changes:
                return
            run.config = after
            if not run.leads or run.forked:
                return
            run.emit_lifecycle("config", after.to_data())
            said = "; ".join(_describe_change(key, before, after) for key in changes)
            payload = JsonObject({"message": f"config: {said}", "changes": changes})
            run.emit_event(CONFIG_CHANGED, "info", step=run.step, payload=payload)
        run.stream.hand_over(_JOURNAL_TIMEOUT_S)

    def __delitem__(self, key: str) -> NoReturn:
        raise TypeError(
            f"a run keeps what it was started with, so {key!r} cannot be removed: "
            f"write session.config[{key!r}] = None"
        )

    if not TYPE_CHECKING:  # for mypy every attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            said = f"'RunConfig' object has no attribute {name!r}"
            if name in self._values:
                said += f". Write session.config[{name!r}]"
            raise AttributeError(said, name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__slots__:
                object.__setattr__(self, name, value)
                return
            raise AttributeError(
                f"'RunConfig' object: {name!r} is no attribute. Write "
                f"session.config[{name!r}] = {describe_argument(value)}",
                name=name,
                obj=self,
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        keys = list(self._values)
        more = f", and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        return f"RunConfig({', '.join(map(repr, keys[:_SHOWN_KEYS]))}{more})"


def _merge(before: ConfigSnapshot, given: ConfigSnapshot) -> ConfigSnapshot:
    """A configuration with new values in the place of those of the same keys."""
    raw = None
    if before.raw is not None or given.raw is not None:
        raw = JsonObject({**(before.raw or before.values), **(given.raw or given.values)})
    # A loop may change one of very many settings: the others are not redacted again.
    is_redacted = all(not each or each.is_redacted for each in (before.values, given.values))
    return ConfigSnapshot(
        JsonObject({**before.values, **given.values}, is_redacted=is_redacted),
        tuple(dict.fromkeys((*before.notes, *given.notes))),
        raw,
    )


def _describe_change(key: str, before: ConfigSnapshot, after: ConfigSnapshot) -> str:
    new = _show(after.values[key])
    if key not in before.values:
        return f"{key} is {new}"
    return f"{key} {_show(before.values[key])} becomes {new}"


def _show(value: object) -> str:
    shown = repr(value)
    return shown[:_SHOWN_VALUE] + "…" * (len(shown) > _SHOWN_VALUE)
