"""WatchedData: a loader whose samples are noted as they come, and which is otherwise itself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quark.provenance.fingerprint_writer import FingerprintWriter, find_writer
from quark_core.config.arguments import check_label
from quark_core.errors import SchemaValidationError
from quark_core.runs.open_run import OpenRun
from quark_core.sessions.session import SampleIds

if TYPE_CHECKING:
    from quark.provenance.stream_fingerprints import StreamDigest
    from quark_core.sessions.session import TrainingSession

_log = logging.getLogger("quark")

# After so many passes only those at powers of two are noted.
_ALL_PASSES = 100
_OWN = frozenset({"_loader", "_key", "_ids", "_run", "_passes", "_open", "__weakref__"})


class WatchedData:
    """Iterates as its loader does; attributes are the loader's. Made by `watch_data`.

    Each pass through it becomes one fingerprint of the run, also one that was left early.
    """

    def __init__(self, loader: Any, key: str, ids: SampleIds, run: OpenRun) -> None:
        self._loader = loader
        self._key = key
        self._ids = ids
        self._run = run
        self._passes = 0
        self._open: weakref.ref[_Pass] | None = None

    def __iter__(self) -> Iterator[Any]:
        """The loader's own batches, unaltered; what it raises passes through."""
        batches: Iterator[Any] = iter(self._loader)
        earlier = None if self._open is None else self._open()
        if earlier is not None:
            earlier.end()
        number, self._passes = self._passes, self._passes + 1
        run = self._run
        is_noted = number < _ALL_PASSES or number & (number - 1) == 0
        if run.refusal is not None or not run.stream.active or not is_noted:
            return batches
        begun = _Pass(batches, self._key, number, self._ids, find_writer(run))
        self._open = weakref.ref(begun)
        return begun

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)  # of one that is only being made, as when it is copied
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __repr__(self) -> str:
        return f"WatchedData({self._loader!r}, {self._key!r})"


class _SizedWatchedData(WatchedData):
    """The same of a loader that has a length."""

    def __len__(self) -> int:
        return len(self._loader)


class _IndexedWatchedData(_SizedWatchedData):
    """The same of what can be indexed too."""

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]


class _Pass:
    """One pass through a loader."""

    def __init__(
        self,
        batches: Iterator[Any],
        key: str,
        number: int,
        ids: SampleIds,
        writer: FingerprintWriter,
    ) -> None:
        from quark.provenance.stream_fingerprints import StreamDigest

        self._batches = batches
        self._key = key
        self._number = number
        self._ids = ids
        self._writer = writer
        self._digest: StreamDigest | None = StreamDigest()
        self._is_whole = False
        self._sees_all = True
        writer.streams.add(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_whole = True
            self.end()
            raise
        except BaseException:
            self.end()
            raise
        digest = self._digest
        if digest is not None:
            try:
                self._note(digest, batch)
            except Exception as error:  # noqa: BLE001 - a step must not fail for this
                self._give_up(error)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_Pass") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __del__(self) -> None:
        try:
            self.end()
        except Exception:  # noqa: BLE001 - nothing may come out of here
            return

    def _note(self, digest: StreamDigest, batch: Any) -> None:
        from quark.provenance.device_values import has_device_values
        from quark.provenance.stream_fingerprints import hash_ids, hash_samples

        if self._ids is not None:
            ids = batch[self._ids] if isinstance(self._ids, str) else self._ids(batch)
            listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
            digest.add(batch, hash_ids(listed), whole=False)
            return
        is_away = has_device_values(batch)
        found = None if is_away else hash_samples(batch)
        hashes, is_whole = found or (None, True)
        self._sees_all = self._sees_all and is_whole
        digest.add(batch, hashes, whole=not is_away)

    def _give_up(self, error: BaseException) -> None:
        self._digest = None
        self._forget()
        self._writer.warn(
            f"stream {self._key}",
            f"data {self._key!r} is no longer watched in this pass: "
            f"{type(error).__name__}: {error!s:.200}",
        )

    def _forget(self) -> None:
        self._writer.streams.discard(self)

    def end(self) -> None:
        """Write what was seen; nothing where that is done already, or nothing came."""
        digest, self._digest = self._digest, None
        if digest is None:
            return
        self._forget()
        if digest.batches == 0 and not self._is_whole:
            return
        kind = "ids" if self._ids is not None else "contents" if self._sees_all else "places"
        metadata = {
            "pass": self._number,
            "whole": self._is_whole,
            **digest.to_metadata(),
        }
        if digest.unseen == digest.batches and digest.batches:
            # Only how many there were is known.
            kind = "count"
        elif digest.unseen:
            kind = "partial"
        self._writer.write_stream(self._key, digest.which, f"stream:{kind}", metadata)


def watch_data(
    session: TrainingSession, loader: Any, name: object, sample_ids: SampleIds
) -> WatchedData:
    """See `quark.watch_data`."""
    key = check_label(name, "name")
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise SchemaValidationError(
            f"loader must be something to iterate over, not {type(loader).__name__}"
        )
    if sample_ids is not None and not isinstance(sample_ids, str) and not callable(sample_ids):
        raise SchemaValidationError(
            "sample_ids must be a key of the batches or a function of a batch, "
            f"not {type(sample_ids).__name__}"
        )
    kind, run = type(loader), session.open_run
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__"):
        return _IndexedWatchedData(loader, key, sample_ids, run)
    return (_SizedWatchedData if hasattr(kind, "__len__") else WatchedData)(
        loader, key, sample_ids, run
    )
