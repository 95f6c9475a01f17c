"""A run's configuration as it is kept, for who has the session; and how it is changed later."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from quark_core.config.arguments import (
    REVISION_FIELD,
    check_fields,
    check_groups,
    describe_argument,
)
from quark_core.config.snapshot import TrackedConfig, list_reads
from quark_core.records import ConfigSnapshot, format_time
from quark_core.records.base import now_us, start_fields
from quark_core.records.json_object import JsonObject, flatten_json
from quark_core.records.runs import RunContext
from quark_core.runs.config_reading import change_config, read_config
from quark_core.runs.open_run import OpenRun
from quark_core.system.terminal_text import clean_line
from quark_core.writers.records import write_records

if TYPE_CHECKING:
    from quark_core.backends.run_summary import RunSummary

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
            f"session.config[{self._key!r}] cannot be changed in place. Change a copy of it "
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
            f"a run keeps its start config, so {key!r} cannot be removed. Write "
            f"session.config[{key!r}] = None"
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
                f"'RunConfig' object: {name!r} is not an attribute. Write "
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


class Belonging:
    """What a session says of where its run belongs, for `TrainingSession`."""

    _run: OpenRun

    @property
    def groups(self) -> tuple[str, ...]:
        """Paths of the run's groups, as known to this process."""
        return self._run.context.run.groups

    @property
    def fields(self) -> dict[str, Any]:
        """Custom fields of the run, as known to this process; a copy."""
        return copy.deepcopy(dict(self._run.fields))

    @property
    def revision(self) -> int | None:
        """Number of this run among those of its config, from 1. None without `if_exists`."""
        revision = self._run.fields.get(REVISION_FIELD)
        return revision if isinstance(revision, int) else None

    @property
    def already_done(self) -> RunSummary | None:
        """Earlier run with the same config, or None.

        Set only after `start_run(if_exists="skip")` or `"resume"`. The session then has the ID and
        config of that run, and records nothing.
        """
        return self._run.already_done

    def add_to_group(self, group: str | Iterable[str]) -> RunContext:
        """Add the run to one or several groups, and return the updated context.

        Args:
            group: Path such as "paper/fig3", or several. Missing groups are created.

        Raises:
            SchemaValidationError: The path is invalid.
            InvalidRunStateError: The run has ended. Use `quark edit RUN --group PATH`.
        """
        return self._regroup("add_to_group", check_groups(group), ())

    def remove_from_group(self, group: str | Iterable[str]) -> RunContext:
        """Remove the run from one or several groups, and return the updated context.

        Groups that the run is not in are ignored. Subgroups are not affected.

        Args:
            group: Path such as "paper/fig3", or several.

        Raises:
            SchemaValidationError: The path is invalid.
            InvalidRunStateError: The run has ended.
        """
        return self._regroup("remove_from_group", (), check_groups(group))

    def annotate(self, values: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Set custom fields of the run, such as `annotate(gpu="V100", accuracy=0.98)`.

        Existing fields are replaced. Find them with `field.gpu == 'V100'`; `quark show` prints
        them. Secrets are redacted. The call waits for the journal.

        Args:
            values: Mapping of fields, for names that are not Python identifiers.
            **fields: str, int, float, bool, None, or JSON values of up to 16 kB.

        Raises:
            SchemaValidationError: A name or value is invalid. The message names it.
            InvalidRunStateError: The run has ended. Use `quark edit RUN --field NAME=VALUE`.
        """
        given = check_fields({} if values is None else values)
        checked = JsonObject({**given, **check_fields(fields)})
        run = self._run
        if run.refusal is not None:
            run.refuse("annotate")
        if not checked:
            return
        with run.lock:
            run.fields = {**run.fields, **checked}
            run.emit_lifecycle("fields", {"set": dict(checked), "remove": []})
        run.stream.hand_over(_JOURNAL_TIMEOUT_S)

    def compare_and_set(self, field: str, expect: Any, value: Any) -> bool:
        """Set a field if its current value is `expect`, and return whether it was set.

        Atomic: if several processes call it with the same `expect`, one of them gets True. Works
        for ended and read-only runs too. The change is logged to the run as a `run_edited` event.

        Args:
            field: Name of the field.
            expect: Expected value. None stands for a missing field.
            value: New value. None removes the field.

        Raises:
            SchemaValidationError: A name or value is invalid. The message names it.
            RunNotFoundError: The run does not exist, or is in the trash.
            SessionStoreError: The store cannot be written, or does not support this.
        """
        # Late: few runs need it, and each start would wait for the import.
        from quark_core.runs.run_editing import exchange_run_field

        run = self._run
        if run.refusal is None:
            run.flush()
        is_set = exchange_run_field(run.context, field, expect, value)
        if is_set:
            with run.lock:
                known = {k: v for k, v in run.fields.items() if k != field}
                run.fields = known if value is None else {**known, **check_fields({field: value})}
        return is_set

    def update_config(self, config: object = None, /, *, show: bool = False, **values: Any) -> None:
        """Change the config of a running run, as `session.config.update` does.

        Args:
            config: Values in any form that `start_run` accepts, including an ArgumentParser.
            show: Whether to print the given values, one per line, with secrets redacted. Defaults
                to False.
            **values: Single values: `update_config(lr=0.1)`.

        Raises:
            SchemaValidationError: `config` is not a mapping. The message names it.
            InvalidRunStateError: The run has ended, or is open for reading.
        """
        given, named = read_config(config), read_config(values or None)
        RunConfig(self._run).take("update_config", given, named)
        if show:
            _print_settings({**given.values, **named.values})

    def _regroup(self, call: str, added: tuple[str, ...], removed: tuple[str, ...]) -> RunContext:
        run = self._run
        if run.refusal is not None:
            run.refuse(call)
        with run.lock:
            record = run.context.run
            groups = tuple(sorted({*record.groups, *added} - {*removed}))
            changed = msgspec.structs.replace(
                record, groups=groups, updated_at=format_time(now_us())
            )
            run.context = msgspec.structs.replace(run.context, run=changed)
            run.emit_lifecycle("group", {"add": list(added), "remove": list(removed)})
        run.stream.hand_over(_JOURNAL_TIMEOUT_S)
        return run.context


def _print_settings(values: Mapping[str, Any]) -> None:
    """Print each setting on a line of its own; a stream that is gone costs nothing."""
    settings = [(clean_line(path), clean_line(str(value))) for path, value in flatten_json(values)]
    width = max((len(path) for path, _ in settings), default=0)
    try:
        for path, value in settings:
            sys.stdout.write(f"{path:<{width}}  {value}\n")
    except (OSError, ValueError, AttributeError):
        return


CONFIG_READS = "config_reads"
"""Key of the fingerprint, of the subject environment, that says it."""

_LEVEL = "keys"
_MOST_KEYS = 5_000


class ConfigReads:
    """Writes down at the run's end which keys of its configuration were read.

    A run that is killed says nothing: then nobody knows. Of a launch of several processes
    this one knows its own reads alone, and those of its forked children.
    """

    def __init__(self, run: OpenRun, config: TrackedConfig) -> None:
        self._run = run
        self._config = config

    def bind(self) -> None:
        """Nothing is kept of a stream."""

    def settle(self) -> None:
        """Write it down."""
        if self._run.forked or not self._run.stream.active:
            return
        read, known = list_reads(self._config)
        if len(known) > _MOST_KEYS:
            return
        # Late: only who tracks a configuration needs them.
        import xxhash

        from quark_core.records.kinds.provenance import FingerprintRecord

        digest = xxhash.xxh3_128_hexdigest("\n".join(read).encode("utf-8", "replace"))
        said = JsonObject({"read": read, "known": known})
        record = FingerprintRecord(
            *start_fields(None), "environment", CONFIG_READS, digest, _LEVEL, metadata=said
        )
        write_records(self._run, [record])


def note_reads(run: OpenRun, config: object) -> ConfigReads | None:
    """Let a run that was given a tracked configuration say at its end what was read of it."""
    if not isinstance(config, TrackedConfig) or not run.leads:
        return None
    reads = ConfigReads(run, config)
    run.writers.add(reads)
    return reads
