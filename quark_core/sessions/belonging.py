"""Where a session's run belongs and what is noted of it: groups, fields, revisions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quark_core.config.belonging import REVISION_FIELD, check_fields, check_groups
from quark_core.records import format_time
from quark_core.records.json_object import JsonObject, flatten_json
from quark_core.records.runs import RunContext
from quark_core.records.times import now_us
from quark_core.runs.config_reading import read_config
from quark_core.runs.open_run import OpenRun
from quark_core.sessions.run_config import RunConfig
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.run_summary import RunSummary

_JOURNAL_TIMEOUT_S = 1.0


class Belonging:
    """What a session says of where its run belongs, for `TrainingSession`."""

    _run: OpenRun

    @property
    def groups(self) -> tuple[str, ...]:
        """Paths of the groups that the run is in, as this process knows it."""
        return self._run.context.run.groups

    @property
    def fields(self) -> dict[str, Any]:
        """What is noted of the run in fields, as this process knows it; a copy."""
        return copy.deepcopy(dict(self._run.fields))

    @property
    def revision(self) -> int | None:
        """Which run of its configuration this is, from 1 on; None unless `if_done` was given."""
        revision = self._run.fields.get(REVISION_FIELD)
        return revision if isinstance(revision, int) else None

    @property
    def already_done(self) -> RunSummary | None:
        """The earlier run that has done this configuration, or is doing it now; else None.

        Only after `start_run(if_done="skip")` or `"resume"`. The session then has that run's
        id and configuration, and records nothing: whatever is logged is dropped.
        """
        return self._run.already_done

    def add_to_group(self, group: str | Iterable[str]) -> RunContext:
        """Put the run into a group, or several, and return the refreshed context.

        Args:
            group: A path such as `paper/fig3`; one that does not exist yet begins with this.

        Raises:
            SchemaValidationError: No path.
            InvalidRunStateError: The run has ended; `quark edit RUN --group PATH` then.
        """
        return self._regroup("add_to_group", check_groups(group), ())

    def remove_from_group(self, group: str | Iterable[str]) -> RunContext:
        """Take the run out of a group, or several, and return the refreshed context.

        A group that the run is not in is no mistake. Groups below the path stay.

        Raises:
            SchemaValidationError: No path.
            InvalidRunStateError: The run has ended.
        """
        return self._regroup("remove_from_group", (), check_groups(group))

    def annotate(self, values: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Note something of the run that is no setting and no curve: `annotate(gpu="V100")`.

        A final figure too: `annotate(accuracy=0.98)`. A field that is there already takes the
        new value. Fields are found by `field.gpu == 'V100'`, and shown by `quark show`. Secrets
        are redacted. Returns once the journal has it.

        Args:
            values: Fields whose names are no words of Python: `{"final/accuracy": 0.98}`.
            fields: str, int, float, bool, None, or JSON values of 16 kB at most.

        Raises:
            SchemaValidationError: A name or value that cannot be kept; the message names it.
            InvalidRunStateError: The run has ended; `quark edit RUN --field NAME=VALUE` then.
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
        """Set a field of the run if its value is `expect`; returns whether it was.

        Of any number of processes that do so at the same moment with the same `expect`, one is
        told True. Also for a run that has ended, or that is open for reading only. What this
        process has noted before is in the store first. Who has set what is an event of the run
        (`run_edited`).

        Args:
            field: Its name, as `annotate` has it; None stands for no field in what follows.
            expect: The value that it must have.
            value: The value that it is to have.

        Raises:
            SchemaValidationError: A name or value that cannot be kept; the message names it.
            RunNotFoundError: The store has no such run, or has it in the trash.
            SessionStoreError: The store cannot be written, or can compare nothing.
        """
        # Late: few runs need it, and each start would wait for the import.
        from quark_core.runs.field_exchange import exchange_run_field

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
        """Change the configuration of a run that goes on: the same as `session.config.update`.

        Args:
            config: Whatever `start_run` takes as `config`, an `argparse.ArgumentParser` too.
            show: Print what was given, a line for each setting, secrets redacted.
            values: Single settings: `update_config(lr=0.1)`.

        Raises:
            SchemaValidationError: `config` is no mapping; the message names it.
            InvalidRunStateError: The run has ended, or is open for reading only.
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
