"""What data was: files, arrays, tables, datasets, by a digest that says how much it has seen."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from quark.provenance.canonical_walk import name_type
from quark.provenance.file_fingerprints import fingerprint_path
from quark.provenance.output_sketch import sketch_output, spread
from quark_core.errors import SchemaValidationError

DataLevel = Literal["sample", "full"]

_ITEMS = 64
_ITEMS_TIMEOUT_S = 5.0
_MOST_ROWS = 65_536
_SAMPLE_ROWS = 4096
_ADVICE = "its samples are seen as they come: for batch in quark.watch_data(source): …"


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
            f"source is a {name_type(source)}, which can be gone through once or has no end; "
            f"{_ADVICE}"
        )
    if "datasets.arrow_dataset.Dataset" in names or "datasets.dataset_dict.DatasetDict" in names:
        return lambda: _take_hugging_face(source)
    if _is_map_style(source, names):
        found = _take_items(source)
        return lambda: found
    if not _is_known(source):
        raise SchemaValidationError(
            f"source is a {name_type(source)}: it must be a path, array, tensor, table or "
            "dataset with len() and [index]; plugins can add types by "
            "quark_register_fingerprints()"
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
    from quark.provenance.value_types import find_reducer

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
