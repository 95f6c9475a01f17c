"""Fingerprints of files, arrays, tables, datasets and outputs."""

from __future__ import annotations

import glob
import math
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quark.provenance.arrays import PLACE_BYTES, PLACES, ArrayForm
from quark.provenance.canonical_encoding import (
    SAMPLE_BYTES,
    CanonicalWalk,
    find_reducer,
    name_type,
    spell_number,
)
from quark_core.errors import SchemaValidationError

if TYPE_CHECKING:
    import numpy.typing as npt

_MOST_FILES = 1_000_000
_MOST_READ_FILES = 10_000
_MOST_NAMED = 16
_READ_BYTES = 1024 * 1024
_POINTER_BYTES = 4096
_WILD = re.compile(r"[*?\[]")
_LFS = re.compile(rb"version https://git-lfs[^\n]*\n(?:[^\n]*\n)*?oid (\w+:[0-9a-f]+)\n")
_DVC = re.compile(rb"^\s*-?\s*(?:md5|etag|checksum|hash_value):\s*([\w.\-]+)\s*$", re.MULTILINE)


@dataclass(slots=True)
class FileFingerprint:
    """What was found out about a file, or many.

    Attributes:
        digest: In hexadecimal.
        level: full, sample, partial (something could not be read, or changed meanwhile), or
            pointer (the hash that a `.dvc` file or Git LFS pointer holds).
        metadata: Counts, and the names of what could not be read.
    """

    digest: str
    level: str
    metadata: dict[str, Any] = field(default_factory=dict)


def fingerprint_path(
    path: str | os.PathLike[str], level: str, advance: Callable[[], None]
) -> FileFingerprint:
    """A file, all files below a folder, or those that a pattern names.

    Args:
        path: A file, folder or pattern. What is no regular file is never opened.
        level: full or sample.
        advance: Called as reading gets on; what it raises ends it.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
    """
    text = os.fspath(path)
    if not os.path.lexists(text) and _WILD.search(text):
        found = sorted(glob.glob(text, recursive=True))
        if not found:
            raise FileNotFoundError(f"no file matches {text}")
        base = Path(_WILD.split(text)[0]).parent if _WILD.search(text) else Path()
        return _digest_many(_name_files(found, base), level, advance)
    if Path(text).is_dir():
        return _digest_many(_walk(text, advance), level, advance)
    pointer = _read_pointer(text)
    if pointer is not None:
        return pointer
    read = _digest_file(text, level)
    advance()
    metadata: dict[str, Any] = {"files": 1, "bytes": read.size_bytes}
    if read.has_changed:
        metadata["changed"] = [Path(text).name]
    return FileFingerprint(
        read.digest.hex(), "partial" if read.has_changed else read.level, metadata
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    digest: bytes
    level: str
    size_bytes: int
    has_changed: bool


def _digest_file(path: str, level: str) -> _Reading:
    """One file: its size, and all of it or 16 places of 64 kB."""
    import xxhash

    # A FIFO that nobody writes into would be waited for at its opening.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        before = os.fstat(number)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"it is not a regular file: {path}")
        size = before.st_size
        hasher = xxhash.xxh3_128(size.to_bytes(8, "little"))
        is_sampled = level == "sample" and size > PLACES * PLACE_BYTES
        with os.fdopen(number, "rb", buffering=0, closefd=False) as file:
            read = 0
            if is_sampled:
                for place in range(PLACES):
                    file.seek((size - PLACE_BYTES) * place // (PLACES - 1))
                    piece = file.read(PLACE_BYTES)
                    hasher.update(piece)
                    read += len(piece)
            else:
                # A file that grows while it is read has no end.
                while read < size and (piece := file.read(min(_READ_BYTES, size - read))):
                    hasher.update(piece)
                    read += len(piece)
        after = os.fstat(number)
    finally:
        os.close(number)
    expected = PLACES * PLACE_BYTES if is_sampled else size
    changed = (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns) or read != expected
    return _Reading(hasher.digest(), "sample" if is_sampled else "full", size, changed)


def _name_files(paths: list[str], base: Path) -> Iterator[tuple[str, str]]:
    for path in paths:
        if not Path(path).is_dir():
            yield Path(os.path.relpath(path, base)).as_posix(), path


def _walk(root: str, advance: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """Name and path of each file below a folder; a link back to a folder above is not followed."""
    seen: set[tuple[int, int]] = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        advance()
        try:
            about = os.stat(folder)
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield Path(os.path.relpath(folder, root)).as_posix() + "/", folder
            continue
        waiting.extend(entry.path for entry in reversed(found) if _is_folder(entry))
        for entry in found:
            if not _is_folder(entry):
                yield Path(os.path.relpath(entry.path, root)).as_posix(), entry.path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _digest_many(
    files: Iterator[tuple[str, str]], level: str, advance: Callable[[], None]
) -> FileFingerprint:
    """Many files: names, sizes and digests, in the order of their names."""
    import xxhash

    listed: list[tuple[str, str]] = []
    for name, path in files:
        if len(listed) >= _MOST_FILES:
            break
        listed.append((name, path))
    listed.sort()
    is_bounded = level == "sample" and len(listed) > _MOST_READ_FILES
    chosen = range(len(listed))
    if is_bounded:
        last = len(listed) - 1
        chosen_places = {last * i // (_MOST_READ_FILES - 1) for i in range(_MOST_READ_FILES)}
    else:
        chosen_places = set(chosen)
    hasher = xxhash.xxh3_128()
    problems: dict[str, list[str]] = {"unreadable": [], "changed": [], "special": []}
    counts = dict.fromkeys(problems, 0)
    size_bytes, levels = 0, {"full"}
    for index, (name, path) in enumerate(listed):
        advance()
        said, size, trouble, found_level = _describe(path, level, is_read=index in chosen_places)
        size_bytes += size
        levels.add(found_level)
        encoded = name.encode("utf-8", "surrogateescape")
        hasher.update(len(encoded).to_bytes(8, "little") + encoded + said)
        if trouble is not None:
            counts[trouble] += 1
            if len(problems[trouble]) < _MOST_NAMED:
                problems[trouble].append(name.encode("utf-8", "replace").decode())
    metadata: dict[str, Any] = {"files": len(listed), "bytes": size_bytes}
    if is_bounded:
        metadata["read"] = len(chosen_places)
    if len(listed) >= _MOST_FILES:
        metadata["more"] = True
    for trouble, names in problems.items():
        if names:
            metadata[trouble] = names
            metadata[f"{trouble}_count"] = counts[trouble]
    found = "sample" if is_bounded or "sample" in levels else "full"
    if counts["unreadable"] or counts["changed"] or len(listed) >= _MOST_FILES:
        found = "partial"
    return FileFingerprint(hasher.hexdigest(), found, metadata)


def _describe(path: str, level: str, *, is_read: bool) -> tuple[bytes, int, str | None, str]:
    """What is digested of one file of many, its size, what is wrong with it, and the level."""
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return b"special", 0, "special", "full"
        if not is_read:
            return b"size" + about.st_size.to_bytes(8, "little"), about.st_size, None, "sample"
        read = _digest_file(path, level)
    except OSError:
        return b"unreadable", 0, "unreadable", "full"
    trouble = "changed" if read.has_changed else None
    return b"file" + read.digest, read.size_bytes, trouble, read.level


def _read_pointer(path: str) -> FileFingerprint | None:
    """The hash that is in a `.dvc` file or in a pointer of Git LFS; None for any other file."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _POINTER_BYTES:
        return None
    content = Path(path).read_bytes()
    if path.endswith(".dvc"):
        hashes = [found.decode() for found in _DVC.findall(content)]
        if hashes:
            digest = ",".join(hashes)
            return FileFingerprint(digest[:_POINTER_BYTES], "pointer", {"pointer": "dvc"})
    pointed = _LFS.match(content)
    if pointed is not None:
        return FileFingerprint(pointed.group(1).decode(), "pointer", {"pointer": "git-lfs"})
    return None


# What a value was: a digest over canonical bytes, and figures that say how far two are apart.
#
# Equal values have equal digests in every process and version of Python: sets are sorted,
# mappings come by key, nothing is pickled, and NaNs are alike whatever their bits. Everything
# else counts by its bits: 0.0 and -0.0 differ, and so do 1 and 1.0, a list and a tuple.
#
# Levels, from the weakest: `type` (only of which type it is), `partial` (some of its parts by
# type only), `sample` (large arrays by size and 16 places of 64 kB), `full`.

_VALUES = 64
_LEAST_VALUES = 4
_MOST_PARTS = 64
# Deviations and means are rounded to this many digits, which every processor agrees about.
_FIGURE_DIGITS = 12


@dataclass(frozen=True, slots=True)
class OutputSketch:
    """What `sketch_output` found out about a value.

    Attributes:
        digest: Of its canonical bytes, in hexadecimal.
        level: How much of it was looked at: full, sample, partial or type.
        sketch: JSON values: `form` (digest of types, keys and shapes), `exact` (digest of all but
            numbers that may differ by rounding), `parts` (for each array,
            number or list of numbers: path, type, dtype, shape, count, non_finite, mean,
            deviation, low, high, values at fixed places) and `more` (parts left out).
        unseen: Paths of what was taken by its type alone, with the type.
    """

    digest: str
    level: str
    sketch: dict[str, Any]
    unseen: tuple[str, ...] = field(default=())


def sketch_output(value: object, *, level: Literal["full", "sample"] = "full") -> OutputSketch:
    """Digest and sketch of any value; never raises for what a value is.

    Args:
        value: Numbers, texts, arrays, tensors, tables, images, containers of them. Tensors on a
            device are brought over, for which the call waits. It is not changed and not kept.
        level: `sample` looks at 16 places of 64 kB of each array above 1 MB.
    """
    walk = CanonicalWalk(level)
    walk.take(value)
    leaves = walk.leaves
    each = max(_LEAST_VALUES, _VALUES // max(1, len(leaves)))
    parts = [_sketch(path, form, each, level) for path, form in leaves[:_MOST_PARTS]]
    sketch: dict[str, Any] = {
        "form": walk.form_digest,
        "exact": walk.exact_digest,
        "type": walk.type_name,
        "parts": parts,
    }
    more = walk.leaf_count - len(parts)
    if more:
        sketch["more"] = more
    return OutputSketch(walk.digest, walk.level, sketch, tuple(walk.unseen))


def _sketch(path: str, form: ArrayForm, values: int, level: str) -> dict[str, Any]:
    import numpy as np

    found: dict[str, Any] = {
        "path": path,
        "type": form.kind,
        "dtype": form.dtype,
        "shape": list(form.shape),
        "count": int(form.bits.size),
    }
    if form.to_numbers is None or not form.bits.size:
        return found
    is_sampled = level == "sample" and form.size_bytes > SAMPLE_BYTES
    tally = _Tally()
    with np.errstate(all="ignore"):
        for piece in form.places() if is_sampled else form.pieces():
            tally.add(form.to_numbers(piece))
        places = spread(int(form.bits.size), values)
        picked = form.to_numbers(form.pick(places))
    if picked.dtype.kind in "fc" and picked.dtype.name not in ("complex64", "float16", "float32"):
        # Python has no long doubles.
        picked = picked.astype(np.complex128 if picked.dtype.kind == "c" else np.float64)
    found.update(tally.to_figures())
    if picked.dtype.kind == "c":
        found["values"] = [[spell_number(n.real), spell_number(n.imag)] for n in picked.tolist()]
    else:
        found["values"] = [spell_number(number) for number in picked.tolist()]
    return found


def spread(count: int, places: int) -> list[int]:
    """Fixed places out of `count`, from the first to the last."""
    if count <= places:
        return list(range(count))
    return [(count - 1) * place // (places - 1) for place in range(places)]


class _Tally:
    """Mean, deviation and bounds of what comes in pieces; of complex numbers, their magnitudes."""

    def __init__(self) -> None:
        self.count = 0
        self.non_finite = 0
        self.mean = 0.0
        self.m2 = 0.0
        self.low = math.inf
        self.high = -math.inf

    def add(self, piece: npt.NDArray[Any]) -> None:
        import numpy as np

        if piece.dtype.kind == "c":
            piece = np.abs(piece)
        numbers = piece.astype(np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            is_finite = np.isfinite(numbers)
            self.non_finite += int(numbers.size - is_finite.sum())
            numbers = numbers[is_finite]
            if not numbers.size:
                return
            low, high = float(numbers.min()), float(numbers.max())
        count = int(numbers.size)
        mean = float(numbers.mean())
        numbers -= mean
        # Not by `dot`, whose threads would take the processors from the training.
        numbers *= numbers
        m2 = float(numbers.sum())
        total = self.count + count
        apart = mean - self.mean
        self.mean += apart * count / total
        self.m2 += m2 + apart * apart * self.count * count / total
        self.count = total
        self.low, self.high = min(self.low, low), max(self.high, high)

    def to_figures(self) -> dict[str, Any]:
        if not self.count:
            return {"non_finite": self.non_finite}
        return {
            "non_finite": self.non_finite,
            "mean": _round(self.mean),
            "deviation": _round(math.sqrt(self.m2 / self.count) if self.m2 >= 0 else math.nan),
            "low": spell_number(self.low),
            "high": spell_number(self.high),
        }


def _round(number: float) -> Any:
    if not math.isfinite(number):
        return None
    return float(f"{number:.{_FIGURE_DIGITS}g}")


DataLevel = Literal["sample", "full"]

_ITEMS = 64
_ITEMS_TIMEOUT_S = 5.0
_MOST_ROWS = 65_536
_SAMPLE_ROWS = 4096
_ADVICE = "watch its samples as they arrive: for batch in quark.watch_data(source): …"


@dataclass(slots=True)
class DataFingerprint:
    """What was found out about data.

    Attributes:
        digest: In hexadecimal, or another tool's hash.
        level: How much of it was looked at; digests of one level can be compared.
        metadata: JSON values: its type, counts, what went wrong.
        sketch: Figures of its numbers, or None.
    """

    digest: str
    level: str
    metadata: dict[str, Any] = field(default_factory=dict)
    sketch: dict[str, Any] | None = None


def plan_fingerprint(
    source: object, level: DataLevel, advance: Callable[[], None]
) -> Callable[[], DataFingerprint]:
    """Decide how a source is fingerprinted; what is returned does it, in any thread.

    The items of a dataset of torch are read here and now, since a dataset may be used by one
    thread only: 64 of them, for 5 s at most, and the states of random generators are put back.

    Raises:
        SchemaValidationError: The source is a stream, or nothing that could be fingerprinted.
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(source).__mro__}
    if isinstance(source, (str, os.PathLike)):
        path: Any = source
        return lambda: _take_path(path, level, advance)
    if hasattr(type(source), "__next__") or _is_stream(names):
        raise SchemaValidationError(
            f"source is a {name_type(source)}, which can be iterated only once or has no end; "
            f"{_ADVICE}"
        )
    if "datasets.arrow_dataset.Dataset" in names or "datasets.dataset_dict.DatasetDict" in names:
        return lambda: _take_hugging_face(source)
    if _is_map_style(source, names):
        found = _take_items(source)
        return lambda: found
    if not _is_known(source):
        raise SchemaValidationError(
            "source must be a path, array, tensor, table or dataset with len() and [index], not "
            f"{name_type(source)}. Plugins can add types with quark_register_fingerprints()"
        )
    return lambda: _take_value(source, level)


def _is_stream(names: set[str]) -> bool:
    return any(
        name.endswith((".IterableDataset", ".DataLoader", ".IterDataPipe")) for name in names
    )


def _is_map_style(source: object, names: set[str]) -> bool:
    if "torch.utils.data.dataset.Dataset" in names:
        return True
    kind = type(source)
    is_sequence = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return is_sequence and not hasattr(kind, "keys") and not _is_known(source)


def _is_known(source: object) -> bool:
    """Whether its contents can be told, by its type."""
    if isinstance(source, (list, tuple, dict, set, frozenset, bytes, bytearray, int, float)):
        return True
    module = type(source).__module__.partition(".")[0]
    if module in ("numpy", "torch", "pandas", "polars", "pyarrow", "PIL", "jax", "jaxlib"):
        return True
    return find_reducer(source) is not None or hasattr(type(source), "__array__")


def _take_path(path: Any, level: str, advance: Callable[[], None]) -> DataFingerprint:
    found = fingerprint_path(path, level, advance)
    return DataFingerprint(found.digest, found.level, {"type": "path", **found.metadata})


def _take_value(source: Any, level: DataLevel) -> DataFingerprint:
    metadata: dict[str, Any] = {"type": name_type(source)}
    value, rows = _cut_table(source) if level == "sample" else (source, None)
    if rows is not None:
        metadata["rows"], metadata["read"] = rows, _SAMPLE_ROWS
        value = [rows, value]
    found = sketch_output(value, level=level)
    if found.unseen:
        metadata["unseen"] = list(found.unseen)
    is_cut = rows is not None and found.level == "full"
    return DataFingerprint(
        found.digest, "sample" if is_cut else found.level, metadata, found.sketch
    )


def _cut_table(source: Any) -> tuple[Any, int | None]:
    """A long table's rows at fixed places, and how many it has; a short one as it is."""
    package = type(source).__module__.partition(".")[0]
    is_table = package in ("pandas", "polars", "pyarrow") and hasattr(type(source), "__len__")
    if not is_table or len(source) <= _MOST_ROWS:
        return source, None
    places = spread(len(source), _SAMPLE_ROWS)
    if package == "pandas":
        return (source.iloc[places] if hasattr(source, "iloc") else source[places]), len(source)
    if package == "polars":
        return source[places], len(source)
    return source.take(places), len(source)


def _take_hugging_face(source: Any) -> DataFingerprint:
    """The fingerprint that a dataset of Hugging Face has of itself."""
    import xxhash

    splits = dict(source) if hasattr(source, "keys") else {"": source}
    prints = {str(name): str(split._fingerprint) for name, split in splits.items()}
    rows = {name: len(split) for name, split in splits.items()}
    if list(prints) == [""]:
        return DataFingerprint(
            prints[""], "huggingface", {"type": name_type(source), "rows": rows[""]}
        )
    said = "\n".join(f"{name}={prints[name]}" for name in sorted(prints))
    digest = xxhash.xxh3_128(said.encode()).hexdigest()
    return DataFingerprint(digest, "huggingface", {"type": name_type(source), "rows": rows})


def _take_items(source: Any) -> DataFingerprint:
    """Length and 64 items at fixed places of what has `len()` and `[index]`."""
    import xxhash

    metadata: dict[str, Any] = {"type": name_type(source)}
    try:
        count = len(source)
    except Exception as error:
        raise SchemaValidationError(
            f"source has no length ({type(error).__name__}: {error}); {_ADVICE}"
        ) from error
    metadata["length"] = count
    hasher = xxhash.xxh3_128(count.to_bytes(8, "little", signed=False))
    whole = hasher.copy()
    deadline_s = time.monotonic() + _ITEMS_TIMEOUT_S
    read, failed, levels, is_same = 0, 0, {"full"}, True
    with keep_random_states():
        for place in spread(count, _ITEMS):
            try:
                found = sketch_output(source[place], level="sample")
                if not read and not failed:
                    is_same = sketch_output(source[place], level="sample").digest == found.digest
            except Exception as error:  # noqa: BLE001 - a dataset may raise anything
                failed += 1
                metadata.setdefault("error", f"item {place}: {type(error).__name__}: {error}"[:200])
                whole.update(b"failed")
            else:
                whole.update(bytes.fromhex(found.digest))
                levels.add(found.level)
                read += 1
            if not is_same or time.monotonic() > deadline_s:
                break
    metadata["read"] = read
    if failed:
        metadata["failed"] = failed
    if not is_same:
        # Its items are other ones each time, so that only the length says anything.
        metadata["not_the_same_twice"] = True
        return DataFingerprint(hasher.hexdigest(), "length", metadata)
    level = "items"
    if failed or levels & {"type", "partial"}:
        level = "partial"
    elif read < min(count, _ITEMS):
        level = f"items:{read}"
    return DataFingerprint(whole.hexdigest(), level, metadata)


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Put back what random numbers would have come: of Python, numpy and torch's CPU."""
    import random

    state = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules.get("torch")
    numpy_state = None if numpy is None else numpy.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy_state is not None:
            numpy.set_state(numpy_state)
        if torch_state is not None:
            torch.set_rng_state(torch_state)
