"""Points in space as a PLY file, which other tools open too."""

from __future__ import annotations

from typing import Any

from quark_core.artifacts.recordings import read_array
from quark_core.errors import SchemaValidationError

_AXES = 3
_WITH_VALUE, _WITH_COLOR = 4, 6
_BYTE = 255


def encode_points(points: Any, colors: Any) -> tuple[bytes, dict[str, Any]]:
    """Points as a binary PLY file, and what is known of it.

    Args:
        points: `(points, 3)` for x, y, z; `(points, 4)` with a value besides, such as an
            intensity or the number of a class; `(points, 6)` with red, green and blue.
        colors: `(points, 3)`, or None: bytes, or floats from 0 to 1.

    Points with a place that is not finite are left out, and counted in `non_finite`.

    Raises:
        SchemaValidationError: Another shape.
    """
    import numpy as np

    array = read_array(points, "points")
    if array.ndim != 2 or array.shape[1] not in (_AXES, _WITH_VALUE, _WITH_COLOR):
        raise SchemaValidationError(
            "points must have the shape (points, 3), with a fourth column for a value, or with "
            f"six for colours, got {array.shape}"
        )
    if array.dtype.kind not in "fiu":
        raise SchemaValidationError(f"points must hold numbers, not {array.dtype}")
    if array.shape[1] == _WITH_COLOR:
        array, colors = array[:, :_AXES], array[:, _AXES:] if colors is None else colors
    shades = None if colors is None else _read_colors(colors, len(array))
    finite = np.isfinite(array[:, :_AXES]).all(axis=1)
    has_value = array.shape[1] == _WITH_VALUE
    fields = [(axis, "<f4") for axis in "xyz"]
    if has_value:
        fields.append(("value", "<f4"))
    if shades is not None:
        fields += [(name, "u1") for name in ("red", "green", "blue")]
    kept = array[finite].astype(np.float32)
    table = np.zeros(len(kept), dtype=fields)
    for place, (name, _) in enumerate(fields[: kept.shape[1]]):
        table[name] = kept[:, place]
    if shades is not None:
        for place, name in enumerate(("red", "green", "blue")):
            table[name] = shades[finite][:, place]
    properties = "".join(
        f"property {'uchar' if kind == 'u1' else 'float'} {name}\n" for name, kind in fields
    )
    head = (
        f"ply\nformat binary_little_endian 1.0\nelement vertex {len(table)}\n"
        f"{properties}end_header\n"
    )
    facts: dict[str, Any] = {
        "media_type": "application/ply",
        "points": len(table),
        "has_colors": shades is not None,
        "has_values": has_value,
    }
    if left_out := len(array) - len(table):
        facts["non_finite"] = left_out
    return head.encode() + table.tobytes(), facts


def _read_colors(colors: Any, count: int) -> Any:
    import numpy as np

    array = read_array(colors, "colors")
    if array.shape != (count, _AXES) or array.dtype.kind not in "fiu":
        raise SchemaValidationError(
            f"colors must have the shape ({count}, 3), as many as there are points, "
            f"got {array.shape}"
        )
    values = np.nan_to_num(array.astype(np.float64))
    # Of six columns of floats the colours may be bytes all the same.
    if array.dtype.kind == "f" and values.max(initial=0.0) <= 1.0:
        values = values * _BYTE
    return np.rint(values.clip(0, _BYTE)).astype(np.uint8)
