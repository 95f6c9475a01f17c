"""WatchedData: a loader whose samples and their order are fingerprinted as they come."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from quark.provenance.arrays import ArrayForm, Unseen, form_array, has_device_values
from quark.provenance.canonical_encoding import CanonicalWalk
from quark.provenance.fingerprint_writer import FingerprintWriter, find_writer
from quark_core.config.arguments import check_label
from quark_core.errors import SchemaValidationError
from quark_core.runs.open_run import OpenRun
from quark_core.sessions.session import SampleIds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from quark_core.sessions.session import TrainingSession

    Hashes: TypeAlias = npt.NDArray[np.uint64]

# Which samples came out of a loader, and in which order, by digests that are made as they come.
#
# Of each sample up to 4 kB, of a larger one the bytes at 16 fixed places, become 64 bits. Their sum
# says which samples there were, in whatever order; a chain over them says in which order. Batches 0
# to 3 and those at powers of two are hashed whole.

_PLACES = 16
_SHORT_BYTES = 4096
# Above this a digest of each row is quicker than mixing all rows at once.
_MIXED_BYTES = 512
_MOST_LEAVES = 16
_MOST_DEPTH = 4
_PLAIN = (str, int, float, bytes)
_FIRST_BATCHES = 4
_MASK = (1 << 64) - 1
# Odd numbers that mix bits well (splitmix64, golden ratio).
_GOLDEN, _MIX, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MOST_MARKS = 40


def hash_samples(batch: object) -> tuple[Hashes, bool] | None:
    """64 bits for each sample of a batch, and whether all of each sample is in them.

    None where samples cannot be told from each other.

    The first dimension of arrays and tensors of the CPU counts as samples, and so do lists as
    long as they. Tensors on a device are not looked at.
    """
    leaves: list[Any] = []
    is_whole = _collect(batch, leaves, 0)
    hashes: Hashes | None = None
    count = -1
    for leaf in leaves:
        if isinstance(leaf, ArrayForm):
            if not leaf.shape or not leaf.bits.size:
                is_whole = False
                continue
            mixed, size = _hash_rows(leaf), leaf.shape[0]
            is_whole = is_whole and _is_short(leaf)
        else:
            mixed, size = hash_ids(leaf), len(leaf)
        if count < 0:
            count = size
        if size != count:
            is_whole = False
            continue
        hashes = mixed if hashes is None else _stir(hashes * _number(_GOLDEN) ^ mixed)
    return None if hashes is None else (hashes, is_whole)


def _number(value: int) -> Any:
    import numpy as np

    return np.uint64(value)


def _collect(value: Any, leaves: list[Any], depth: int) -> bool:
    """The arrays of a batch, mappings by key, and lists of texts or numbers; whether it is all."""
    if len(leaves) >= _MOST_LEAVES or depth > _MOST_DEPTH:
        return False
    if isinstance(value, Mapping):
        items = [value[key] for key in sorted(value, key=str)]
        return _collect_all(items, leaves, depth)
    if isinstance(value, (list, tuple)):
        if value and all(type(item) in _PLAIN for item in value):
            leaves.append(value)
            return True
        return _collect_all(value[: _MOST_LEAVES + 1], leaves, depth)
    if is_on_device(value):
        return False
    try:
        form = form_array(value)
    except Unseen:
        return False
    if form is not None:
        leaves.append(form)
    return form is not None


def _collect_all(items: Sequence[Any], leaves: list[Any], depth: int) -> bool:
    seen = [_collect(item, leaves, depth + 1) for item in items]
    return all(seen)


def is_on_device(value: Any) -> bool:
    """Whether looking at a tensor would wait for a device."""
    device = getattr(value, "device", None)
    return getattr(device, "type", "cpu") not in ("cpu", None)


def _hash_rows(form: ArrayForm) -> Hashes:
    """Of each row of an array, all bytes of a short one, or those at 16 places."""
    import numpy as np
    import xxhash

    rows = form.bits.reshape(form.shape[0], -1)
    width = rows.shape[1]
    # The same places of every row, the first and the last among them.
    places = [(width - 1) * i // (_PLACES - 1) for i in range(_PLACES)]
    picked = np.ascontiguousarray(rows if _is_short(form) else rows[:, places])
    if form.clean is not None:
        picked = form.clean(picked)
    raw = picked.view(np.uint8).reshape(form.shape[0], -1)
    if raw.shape[1] > _MIXED_BYTES:
        digest, line = xxhash.xxh3_64_intdigest, raw.shape[1]
        flat: Any = raw.reshape(-1)
        whole = memoryview(flat)
        found = [digest(whole[at : at + line]) for at in range(0, len(whole), line)]
        return np.array(found, dtype=np.uint64)
    short = -raw.shape[1] % 8
    if short:
        raw = np.pad(raw, ((0, 0), (0, short)))
    words = np.ascontiguousarray(raw).view(np.uint64)
    # Rows of another width are other samples, whatever is at the places.
    columns = [(column + 1) * _GOLDEN & _MASK for column in range(words.shape[1])]
    mixed = _stir(words ^ np.array(columns, dtype=np.uint64))
    return _stir(mixed.sum(axis=1, dtype=np.uint64) ^ _number(width * _GOLDEN & _MASK))


def _is_short(form: ArrayForm) -> bool:
    """Whether rows are so short that all of each is looked at."""
    return form.size_bytes <= form.shape[0] * _SHORT_BYTES


def hash_ids(ids: Sequence[Any]) -> Hashes:
    """64 bits for each id, text or number of a list."""
    import numpy as np
    import xxhash

    if ids and all(type(item) is int and -(2**63) <= item < 2**63 for item in ids):
        return _stir(np.array(ids, dtype=np.int64).view(np.uint64) ^ _number(_GOLDEN))
    found = [
        xxhash.xxh3_64_intdigest(
            item if isinstance(item, bytes) else f"{type(item).__name__}:{item}".encode()
        )
        for item in ids
    ]
    return np.array(found, dtype=np.uint64)


def _stir(hashes: Any) -> Hashes:
    """Mix the bits of each, so that one bit of the input changes half of them."""
    mixed: Hashes = (hashes ^ (hashes >> _number(30))) * _number(_MIX)
    mixed = (mixed ^ (mixed >> _number(27))) * _number(_SECOND)
    last: Hashes = mixed >> _number(31)
    return mixed ^ last


class StreamDigest:
    """The digests of one pass through a loader.

    Attributes:
        batches: Batches that came.
        samples: Samples of those that could be told from each other.
        unseen: Batches that could not be looked at, such as those on a device.
        contents: Batches that were hashed whole.
    """

    def __init__(self) -> None:
        import xxhash

        self._sums = [0, 0]
        self._chain = xxhash.xxh3_128()
        self._contents = xxhash.xxh3_128()
        self._marks: list[list[Any]] = []
        self.batches = 0
        self.samples = 0
        self.unseen = 0
        self.contents = 0

    def add(self, batch: object, hashes: Hashes | None, *, whole: bool) -> None:
        """Take a batch up.

        Args:
            batch: What came.
            hashes: 64 bits for each sample of it, or None where they cannot be told.
            whole: Whether it may be hashed whole, at the places where that is done.
        """
        if whole and is_placed(self.batches):
            walk = CanonicalWalk("sample")
            walk.take(batch)
            if walk.level in ("full", "sample"):
                self._contents.update(bytes.fromhex(walk.digest))
                self.contents += 1
        if hashes is None:
            self.unseen += 1
        else:
            self._mix_in(hashes)
        self.batches += 1
        if is_placed(self.batches) and len(self._marks) < _MOST_MARKS:
            self._marks.append([self.batches, self.which, self.order])

    def _mix_in(self, hashes: Hashes) -> None:
        import numpy as np

        again = _stir(hashes * _number(_GOLDEN))
        with np.errstate(over="ignore"):
            sums = (int(hashes.sum(dtype=np.uint64)), int(again.sum(dtype=np.uint64)))
        self._sums = [(one + other) & _MASK for one, other in zip(self._sums, sums, strict=True)]
        self._chain.update(hashes.astype("<u8", copy=False).tobytes())
        self.samples += len(hashes)

    @property
    def which(self) -> str:
        """Says which samples came, in whatever order."""
        return f"{self._sums[0]:016x}{self._sums[1]:016x}"

    @property
    def order(self) -> str:
        """Says in which order they came; how they were cut into batches does not matter."""
        return str(self._chain.hexdigest())

    def to_metadata(self) -> dict[str, Any]:
        """All but `which`, as JSON values."""
        found: dict[str, Any] = {
            "order": self.order,
            "batches": self.batches,
            "samples": self.samples,
            "marks": [list(mark) for mark in self._marks],
        }
        if self.contents:
            found["contents"] = str(self._contents.hexdigest())
            found["hashed"] = self.contents
        if self.unseen:
            found["unseen"] = self.unseen
        return found


def is_placed(number: int) -> bool:
    """Whether a batch of this number is hashed whole: 0 to 3 and powers of two."""
    return number < _FIRST_BATCHES or number & (number - 1) == 0


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
        raise SchemaValidationError(f"loader must be iterable, not {type(loader).__name__}")
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
