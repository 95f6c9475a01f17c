"""The methods of TrainingSession for fingerprints of data and outputs; a plugin has their work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.sessions.feature_methods import find_method

_FEATURE = "provenance"

SampleIds = str | Callable[[Any], Any] | None


class PendingFingerprint:
    """A fingerprint that is being found out; what `fingerprint` and `fingerprint_data` return.

    Attributes:
        key: Its key.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._done = threading.Event()
        self._record: FingerprintRecord | None = None
        self._reason = ""

    @property
    def done(self) -> bool:
        """Whether it is found out, or never will be."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> FingerprintRecord | None:
        """The record, once it is found out; None where there is none, which `reason` tells.

        Args:
            timeout_s: How long to wait; as long as it takes by default.

        Raises:
            TimeoutError: It is not found out yet; it goes on.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"fingerprint {self.key!r} is not found out within {timeout_s} s")
        return self._record

    @property
    def reason(self) -> str:
        """Why there is no record; empty as long as there may be one."""
        return self._reason

    def settle(self, record: FingerprintRecord | None, reason: str = "") -> None:
        """It is found out, or never will be."""
        self._record, self._reason = record, reason
        self._done.set()

    def __repr__(self) -> str:
        state = self._record.digest if self._record else self._reason or "on its way"
        return f"PendingFingerprint({self.key!r}, {state})"


class Fingerprints:
    """What data and outputs were, by digest: `quark why` tells from it what is the same."""

    def fingerprint(
        self,
        key: str,
        value: object,
        *,
        step: int | None = None,
        level: Literal["sample", "full"] = "sample",
    ) -> PendingFingerprint:
        """Note what an output was: a digest, and a sketch that tells rounding from change.

        The value is taken as it is now. Values of the CPU are hashed in the call: about 0.2 ms
        for 1 MB, and no more for a larger array at level `sample`. Tensors on a device are
        copied there, 256 MB at most, and hashed by a thread: nobody waits for the device.

        Args:
            key: Name, such as `predictions`.
            value: An array, tensor, table, image, number, text, or containers of them. Parts of
                another type count by their type alone, which the fingerprint says.
            step: Step counter; by default what `session.step` has set, or None.
            level: `full` looks at all of arrays above 1 MB, `sample` at 16 places of 64 kB.

        Returns:
            A PendingFingerprint; `.wait()` gives the record.

        Raises:
            SchemaValidationError: A bad key, step or level; never for what the value is.
            InvalidRunStateError: The run has ended.
            QuarkError: The feature provenance is not installed.
        """
        found: PendingFingerprint = find_method("fingerprint", _FEATURE)(
            self, key, value, step, level
        )
        return found

    def fingerprint_data(
        self, key: str, source: object, *, level: Literal["sample", "full"] = "sample"
    ) -> PendingFingerprint:
        """Note what data a run has, beside training; returns at once.

        Only the rank that leads the run does it. An array or table must not be changed until it
        is done. Of a dataset with `len()` and `[index]`, 64 items are read in this call, 5 s at
        most, and random states are put back.

        Args:
            key: Name, such as `train`.
            source: The path of a file or folder, or a pattern; an array, tensor, table; a
                dataset of Hugging Face (its own fingerprint), of torch or alike; a `.dvc` file or
                Git LFS pointer (the hash in it).
            level: `sample` reads 16 places of 64 kB of each file or array, `full` all of it.

        Returns:
            A PendingFingerprint; `.wait()` gives the record, or None where it failed.

        Raises:
            SchemaValidationError: A bad argument, or a stream: see `watch_data`.
            InvalidRunStateError: The run has ended.
            QuarkError: The feature provenance is not installed.
        """
        found: PendingFingerprint = find_method("fingerprint_data", _FEATURE)(
            self, key, source, level
        )
        return found

    def watch_data(self, loader: Any, name: str = "train", *, sample_ids: SampleIds = None) -> Any:
        """The same loader, whose samples are noted as they come; see `quark.watch_data`."""
        return find_method("watch_data", _FEATURE)(self, loader, name, sample_ids)
