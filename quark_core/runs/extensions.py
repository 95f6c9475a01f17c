"""What features keep with an open run, and what the run asks of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quark_core.backends.registry import default_registry
from quark_core.records import ConfigSnapshot, RunStatus

if TYPE_CHECKING:
    from quark_core.config.objective import Objective
    from quark_core.runs.open_run import OpenRun

T = TypeVar("T")
_log = logging.getLogger("quark")


class RunExtension:
    """State of a feature in a run that is open in this process, kept in `session.extensions`.

    Override the methods that the feature needs. A method that raises is logged and passed over.

    Attributes:
        is_announced: Whether the run's start is announced on the console.
    """

    is_announced = True

    def describe_start(self) -> Mapping[str, Any]:
        """JSON values to add to the record of the run's start."""
        return {}

    def describe_heartbeat(self) -> Mapping[str, Any]:
        """JSON values to add to the next heartbeat, which comes every 10 s."""
        return {}

    def settle(self) -> None:
        """Log what must come before the run's end; every writer has finished."""

    def describe_end(self, run: OpenRun, status: RunStatus) -> Mapping[str, Any]:  # noqa: ARG002
        """JSON values to add to the record of the run's end."""
        return {}

    def summarize(self) -> str | None:
        """The result in one line, in place of the run's name and status at its end."""
        return None

    def list_faults(self) -> Iterable[str]:
        """What is known to be wrong, for the last line about the run on the console."""
        return ()

    def catches(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether an error that leaves a `with` block of the session ends there, as completed."""
        return False


@dataclass(slots=True, kw_only=True)
class RunDraft:
    """A run that is about to be started or resumed; a plugin may change it.

    Attributes:
        storage_dir: Where the run is stored, as the program asked for it, or None.
        config: The configuration; None where a run is resumed, which keeps its own.
        objective: What the run is judged by, or None. A resumed run keeps its own.
        tags, groups: Tags and paths of groups. A resumed run keeps its own.
        launch_key: Tells the ranks of a launch that this is another run than one with another key.
        extensions: Where `session.extensions` begins.
    """

    storage_dir: str | Path | None
    config: ConfigSnapshot | None = None
    objective: Objective | None = None
    tags: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    launch_key: str = ""
    extensions: dict[type, object] = field(default_factory=dict)

    def complete(self) -> RunDraft:
        """Let plugins change it.

        Raises:
            QuarkError: A plugin refuses the run.
        """
        default_registry().ask("quark_run_starting", draft=self)
        return self


def ask_extensions(
    extensions: Mapping[type, object], question: Callable[[RunExtension], T]
) -> list[T]:
    """What each extension of a run answers; one that raises is logged and passed over."""
    answers = []
    for each in list(extensions.values()):
        if isinstance(each, RunExtension):
            try:
                answers.append(question(each))
            except Exception:  # noqa: BLE001 - a feature must not end a run
                _log.exception("%s failed in a run", type(each).__name__)
    return answers
