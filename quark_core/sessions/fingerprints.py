"""What a session says of data and outputs, for TrainingSession."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from quark_core.runs.open_run import OpenRun

# Not late: a signal handler that fingerprints would find them half imported.
from quark_core.writers.fingerprints import find_writer
from quark_core.writers.watched_data import watch_loader

if TYPE_CHECKING:
    from quark_core.writers.fingerprints import PendingFingerprint
    from quark_core.writers.watched_data import SampleIds, WatchedData

__all__ = ["Fingerprints"]


class Fingerprints:
    """What data and outputs were, by digest: `quark why` tells from it what is the same."""

    _run: OpenRun

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
        """
        return find_writer(self._run).fingerprint(key, value, step, level)

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
        """
        return find_writer(self._run).fingerprint_data(key, source, level)

    def watch_data(
        self, loader: Any, name: str = "train", *, sample_ids: SampleIds = None
    ) -> WatchedData:
        """The same loader, whose samples are noted as they come; see `quark.watch_data`."""
        return watch_loader(self._run, loader, name, sample_ids)
