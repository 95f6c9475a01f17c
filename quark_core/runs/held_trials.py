"""The trial that a run of this process takes up: what a run must know of it, which is little.

A trial is held by a loop over a sweep (`current_trial`), or it is named by QUARK_TRIAL, as
`quark sweep run` sets it. The first run that begins meanwhile is the trial's.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quark_core.config import settings
from quark_core.records import ConfigSnapshot, RunStatus
from quark_core.records.sweeps import TrialClaim

if TYPE_CHECKING:
    from quark_core.config.objective import Objective
    from quark_core.runs.open_run import OpenRun

__all__ = ["HeldTrial", "current_trial", "describe_claim", "find_held_trial"]

# Of a higher room, which only a process that has a trial imports.
_ROOM = "quark_core.sweeps.given_trial"


class HeldTrial(Protocol):
    """A trial that this process holds, as far as its run must know it."""

    @property
    def claim(self) -> TrialClaim:
        """By what it is held."""

    @property
    def group(self) -> str:
        """Path of the group that its run is in."""

    @property
    def objective(self) -> Objective:
        """What its run is judged by, where nobody says otherwise."""

    @property
    def storage_dir(self) -> Path:
        """The storage root of its sweep, where its run begins where nobody says otherwise."""

    @property
    def is_taken(self) -> bool:
        """Whether a run has taken it up already."""

    def join_config(self, given: ConfigSnapshot) -> ConfigSnapshot:
        """A run's configuration with the trial's parameters."""

    def take(self, run: OpenRun) -> None:
        """Be the trial of a run that has just been opened here."""

    def tell(self, run: OpenRun, status: RunStatus) -> dict[str, Any] | None:
        """What the run's end says of the trial; None where the status says it all."""

    def describe_end(self) -> str:
        """What has become of it, for the last line that its run says."""

    def ends_by(self, error: BaseException | None) -> bool:
        """Whether an error only ends this trial, and nothing beyond its run."""


current_trial: ContextVar[HeldTrial | None] = ContextVar("quark_current_trial", default=None)
"""The trial that is being worked at here, or None."""


def find_held_trial(storage_dir: str | Path | None) -> HeldTrial | None:
    """The trial that a run which begins now takes up, or None; costs nothing where there is none.

    Args:
        storage_dir: Where the run begins, as its user says.

    Raises:
        SchemaValidationError: QUARK_TRIAL names no trial of the store.
        SessionStoreError: The store cannot say.
    """
    trial = current_trial.get()
    if trial is None:
        text = os.environ.get(settings.TRIAL, "").strip()
        if not text:
            return None
        trial = import_module(_ROOM).open_given_trial(text, storage_dir)
    return None if trial is None or trial.is_taken else trial


def describe_claim(trial: HeldTrial | None) -> dict[str, Any]:
    """What the start of a run says of the trial that it has."""
    if trial is None:
        return {}
    claim = trial.claim
    said = {"sweep_id": claim.sweep_id, "number": claim.number, "token": claim.token}
    return {"trial": said}
