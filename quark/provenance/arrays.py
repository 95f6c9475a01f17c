"""Arrays and tensors of any library: as bits and numbers, and copied without waiting."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

CHUNK_ITEMS = 1 << 16
"""Items of an array that are looked at in one go, so that memory is bounded."""

PLACES = 16
"""Places of an array or file that level `sample` looks at, spread evenly over it."""

PLACE_BYTES = 64 * 1024
"""Size of each of those places."""

_FLOAT8_VALUES = 256
# Kinds of numpy dtypes whose bytes are their value.
_PLAIN_KINDS = "biufcmMSU"


class Unseen(Exception):
    """The contents of a value cannot be looked at here; the text says why."""


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """An array as its bits.

    Attributes:
        kind: Which library's, such as `torch.Tensor`.
        dtype: Name of the type of its items.
        shape: Its shape.
        bits: Its items, of a type whose bytes are their value, in any layout.
        to_numbers: Makes numbers of a piece of `bits`; None where items are no numbers.
        clean: Makes NaNs of a piece of `bits` alike; None where there are none.
        extra: What else tells it from others, such as a scale.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bits: Array
    to_numbers: Callable[[Array], Array] | None
    clean: Callable[[Array], Array] | None = None
    extra: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all items."""
        return int(self.bits.size) * int(self.bits.dtype.itemsize)

    def cut(self, start: int, stop: int) -> Array:
        """The items from `start` to `stop` of it, flattened in C order, with NaNs made alike."""
        bits = self.bits
        piece = bits.reshape(-1)[start:stop] if bits.flags.c_contiguous else bits.flat[start:stop]
        return piece if self.clean is None else self.clean(piece)

    def pieces(self) -> Iterator[Array]:
        """All of it, piece by piece, in C order."""
        size = int(self.bits.size)
        for start in range(0, size, CHUNK_ITEMS):
            yield self.cut(start, min(size, start + CHUNK_ITEMS))

    def places(self) -> Iterator[Array]:
        """What level `sample` looks at: 16 pieces of 64 kB, spread evenly."""
        size = int(self.bits.size)
        length = max(1, PLACE_BYTES // max(1, int(self.bits.dtype.itemsize)))
        for place in range(PLACES):
            start = (size - length) * place // (PLACES - 1)
            yield self.cut(start, start + length)

    def pick(self, places: list[int]) -> Array:
        """Single items, by their place in C order."""
        import numpy as np

        if self.bits.flags.c_contiguous:
            piece = self.bits.reshape(-1)[places]
        else:
            piece = self.bits[np.unravel_index(places, self.bits.shape)]
        return piece if self.clean is None else self.clean(piece)


def form_array(value: Any) -> ArrayForm | None:
    """An array or tensor in this form; None for what is none, or has objects as items.

    A tensor on a device is brought over, for which the call waits.

    Raises:
        Unseen: It has no contents here, such as one of the device `meta`.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _form_numpy(value, "numpy.ndarray" if value.shape else "numpy.generic")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return _form_tensor(torch, value)
    return None


def form_foreign(value: Any, kind: str) -> ArrayForm | None:
    """What says of itself how it becomes a numpy array, such as an array of JAX."""
    import numpy as np

    return _form_numpy(np.asarray(value), kind)


def _form_numpy(value: Any, kind: str) -> ArrayForm | None:
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        return None
    bits = np.asarray(value)
    dtype = bits.dtype
    name = dtype.name
    if dtype.kind == "V" and dtype.names is None and _is_number(dtype):
        # Types of ml_dtypes, such as bfloat16: numbers that numpy knows by their bytes only.
        raw = bits.view(f"u{dtype.itemsize}")
        own = dtype

        def widen(piece: Array) -> Array:
            return piece.view(own).astype(np.float32)

        return ArrayForm(kind, name, bits.shape, raw, widen, _clean_by(widen))
    if dtype.kind not in _PLAIN_KINDS:
        return None
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        bits = bits.astype(dtype.newbyteorder("<"))
    if dtype.kind in "mM":
        name = dtype.str.lstrip("<>|=")
        return ArrayForm(kind, name, bits.shape, bits.view("i8"), _keep)
    if dtype.kind in "SU":
        return ArrayForm(kind, dtype.str.lstrip("<>|="), bits.shape, bits, None)
    clean = _clean_floats if dtype.kind in "fc" else None
    if (dtype.kind == "f" and dtype.itemsize > 8) or (dtype.kind == "c" and dtype.itemsize > 16):
        # Of a long double some bytes are padding, which may hold anything.
        clean = _clean_long
    return ArrayForm(kind, name, bits.shape, bits, _keep, clean)


def _is_number(dtype: Any) -> bool:
    import numpy as np

    try:
        np.zeros(1, dtype).astype(np.float32)
    except (TypeError, ValueError):
        return False
    return str(dtype.type.__module__).startswith("ml_dtypes")


def _keep(piece: Array) -> Array:
    return piece


def _clean_floats(piece: Array) -> Array:
    import numpy as np

    bad = np.isnan(piece)
    if not bad.any():
        return piece
    cleaned = piece.copy()
    cleaned[bad] = np.nan
    return cleaned


def _clean_long(piece: Array) -> Array:
    import numpy as np

    cleaned = np.zeros(piece.shape, piece.dtype)
    cleaned[...] = piece
    return _clean_floats(cleaned)


def _clean_by(widen: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Makes NaNs alike of bits that numpy has no type for."""

    def clean(piece: Array) -> Array:
        import numpy as np

        bad = np.isnan(widen(piece))
        if not bad.any():
            return piece
        cleaned = piece.copy()
        cleaned[bad] = np.iinfo(piece.dtype).max
        return cleaned

    return clean


def _form_tensor(torch: Any, value: Any) -> ArrayForm:
    import numpy as np

    tensor = value.detach()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    kind = "torch.Tensor"
    if tensor.is_meta or tensor.device.type == "meta":
        raise Unseen("a tensor of the device meta has no contents")
    if tensor.layout is not torch.strided:
        raise Unseen("its layout is taken apart elsewhere")
    if tensor.is_quantized:
        extra = _describe_quantisation(torch, tensor)
        raw = tensor.int_repr().cpu().numpy()
        return ArrayForm(kind, dtype, shape, raw, _keep, extra=extra)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    if dtype == "bfloat16":
        raw = tensor.view(torch.int16).numpy().view(np.uint16)
        return ArrayForm(kind, dtype, shape, raw, _widen_bfloat16, _clean_by(_widen_bfloat16))
    if dtype.startswith(("float8", "float4")):
        raw = tensor.view(torch.uint8).numpy()
        table = _read_float8(torch, tensor.dtype)

        def look_up(piece: Array) -> Array:
            return table[piece]

        return ArrayForm(kind, dtype, shape, raw, look_up, _clean_by(look_up))
    try:
        bits = tensor.numpy()
    except (TypeError, RuntimeError, ValueError) as error:
        raise Unseen(f"numpy cannot represent it: {error}") from error
    clean = _clean_floats if bits.dtype.kind in "fc" else None
    return ArrayForm(kind, dtype, shape, bits, _keep, clean)


def _widen_bfloat16(piece: Array) -> Array:
    import numpy as np

    return (piece.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _read_float8(torch: Any, dtype: Any) -> Array:
    """The number of each byte."""
    try:
        every = torch.arange(_FLOAT8_VALUES, dtype=torch.uint8).view(dtype)
        table: np.ndarray[Any, Any] = every.to(torch.float32).numpy()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise Unseen(f"torch cannot read {dtype}: {error}") from error
    return table


def _describe_quantisation(torch: Any, tensor: Any) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {tensor.q_scale()!r} zero {tensor.q_zero_point()!r}"
    scales = tensor.q_per_channel_scales().tolist()
    zeros = tensor.q_per_channel_zero_points().tolist()
    return f"axis {tensor.q_per_channel_axis()} scales {scales!r} zeros {zeros!r}"


def split_sparse(torch: Any, tensor: Any) -> dict[str, Any]:
    """A sparse tensor as the dense ones that it is made of."""
    tensor = tensor.detach()
    layout = tensor.layout
    if layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return {"indices": whole.indices(), "values": whole.values()}
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = {"outer": tensor.crow_indices(), "inner": tensor.col_indices()}
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = {"outer": tensor.ccol_indices(), "inner": tensor.row_indices()}
    elif layout is getattr(torch, "jagged", None):
        parts = {"outer": tensor.offsets()}
    else:
        raise Unseen(f"its layout is {layout}")
    return {**parts, "values": tensor.values()}


_MOST_ITEMS = 10_000
_MOST_DEPTH = 16
_MOST_CLONED_BYTES = 256 * 1024 * 1024


def has_device_values(value: object) -> bool:
    """Whether a value is a tensor on a device, or a container that has one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return False
    waiting, left = [(value, 0)], _MOST_ITEMS
    while waiting and left > 0:
        one, depth = waiting.pop()
        left -= 1
        if isinstance(one, torch.Tensor):
            if one.device.type not in ("cpu", "meta"):
                return True
        elif depth < _MOST_DEPTH:
            waiting.extend((item, depth + 1) for item in _list_items(one))
    return False


def _list_items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value[:_MOST_ITEMS])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in dataclasses.fields(value)]
    return []


def detach_device_values(value: Any) -> Callable[[], Any] | None:
    """Take a value as it is now, without a wait; what is returned gives it, on the CPU.

    Tensors on a device are copied there, in the order of the device's work, and brought over by
    whoever calls what is returned. Arrays and tensors of the CPU are copied.

    Returns:
        None where it is too large (256 MB) to be copied, or a graph is being captured.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    taken = _Taking(torch)
    snapshot = taken.take(value, 0)
    if snapshot is _TOO_LARGE or taken.is_too_large:
        return None
    event = None
    if taken.device is not None and taken.device.type == "cuda":
        with torch.cuda.device(taken.device):
            event = torch.cuda.Event()
            event.record()

    def bring_over() -> Any:
        if event is None:
            return _bring_over(snapshot, torch)
        with torch.cuda.device(taken.device):
            event.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                return _bring_over(snapshot, torch)

    return bring_over


_TOO_LARGE = object()


class _Taking:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._left_bytes = _MOST_CLONED_BYTES
        self._left_items = _MOST_ITEMS
        self.is_too_large = False
        self.device: Any = None

    def take(self, value: Any, depth: int) -> Any:
        self._left_items -= 1
        if self._left_items < 0 or depth > _MOST_DEPTH:
            self.is_too_large = True
            return _TOO_LARGE
        if isinstance(value, self._torch.Tensor):
            return self._clone(value)
        if type(value).__module__ == "numpy" and hasattr(value, "nbytes"):
            self._spend(int(value.nbytes))
            return _TOO_LARGE if self.is_too_large else value.copy()
        return _map_items(value, lambda item: self.take(item, depth + 1))

    def _clone(self, tensor: Any) -> Any:
        if tensor.device.type == "meta":
            return tensor
        self._spend(tensor.numel() * tensor.element_size())
        if self.is_too_large:
            return _TOO_LARGE
        if tensor.device.type != "cpu":
            self.device = tensor.device
        return tensor.detach().clone()

    def _spend(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        self.is_too_large = self.is_too_large or self._left_bytes < 0


def _bring_over(value: Any, torch: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type in ("cpu", "meta") else value.cpu()
    return _map_items(value, lambda item: _bring_over(item, torch))


def _map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type with each of its items changed; anything else as it is."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*map(change, value))
    if kind in (list, tuple):
        return kind(map(change, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(cast("Any", value))
        for one in dataclasses.fields(value):
            object.__setattr__(twin, one.name, change(getattr(value, one.name)))
        return twin
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = change(item)
        return twin
    return value
