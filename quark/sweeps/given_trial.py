"""The trial that QUARK_TRIAL names: somebody else has claimed it for this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.store_link import StoreLink
from quark.sweeps.sweep import Sweep
from quark.sweeps.trial import Trial
from quark_core.config import settings
from quark_core.config.arguments import resolve_storage_dir
from quark_core.records.sweeps import TrialClaim

_lock = threading.Lock()
_given: dict[str, Trial] = {}


def open_given_trial(text: str, storage_dir: str | Path | None) -> Trial:
    """The trial that a text names; the same object for the same text.

    Args:
        text: As QUARK_TRIAL has it.
        storage_dir: The storage root, where somebody says; else QUARK_SWEEP_STORAGE_DIR, else as
            of any run.

    Raises:
        SchemaValidationError: It names no trial of the store, or one that was claimed again.
        SessionStoreError: The store cannot say.
    """
    claim = TrialClaim.from_text(text, settings.TRIAL)
    with _lock:
        found = _given.get(text)
        if found is None:
            if storage_dir is None:
                storage_dir = os.environ.get(settings.SWEEP_STORAGE_DIR, "").strip() or None
            link = StoreLink(resolve_storage_dir(storage_dir))
            try:
                stored = link.store.load_sweep(claim.sweep_id)
                sweep = Sweep(link, stored, SweepDefinition.build(stored.definition))
                found = _given[text] = sweep.hold_given(claim.number, claim.token)
            except BaseException:
                link.close()
                raise
        return found


def find_given(sweep_id: str, storage_dir: Path) -> Trial | None:
    """The trial of a sweep that QUARK_TRIAL names, or None.

    Raises:
        SchemaValidationError, SessionStoreError: As of `open_given_trial`.
    """
    text = os.environ.get(settings.TRIAL, "").strip()
    if not text or TrialClaim.from_text(text, settings.TRIAL).sweep_id != sweep_id:
        return None
    return open_given_trial(text, storage_dir)
