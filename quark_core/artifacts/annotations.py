"""What lies over an image: boxes, and masks of classes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quark_core.artifacts.recordings import read_array
from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.dataframes import import_library

if TYPE_CHECKING:
    from quark_core.records.columns import Array

BOX_FORMATS = ("xyxy", "xywh", "cxcywh")
"""How the four numbers of a box may be meant."""

_MOST_BOXES = 1_000
_MOST_GROUPS = 20
_MOST_CLASSES = 1_000
_MOST_LABEL = 200
_SIDES = 4
_BYTE = 256
_DEFAULT_BOXES, _DEFAULT_MASK = "boxes", "mask"
_TORCHVISION = "boxes"
_BOX = "box"


class EncodedMask(NamedTuple):
    """A mask as a PNG file, and what it is.

    Attributes:
        name: Which of the image's masks.
        data: The file: gray where no class is above 255, otherwise red + 256 * green.
        classes: Numbers of the classes that are in it, ascending.
        encoding: L or RGB.
    """

    name: str
    data: bytes
    classes: list[int]
    encoding: str


def describe_boxes(boxes: Any, box_format: object) -> tuple[dict[str, Any], int]:
    """Boxes as JSON: group -> `[{"box": [left, top, right, bottom], "label", "score"}]`.

    Args:
        boxes: A sequence of mappings with `box` and, where known, `label` and `score`; of
            sequences of four numbers; what torchvision has (`{"boxes", "labels", "scores"}`);
            or a mapping of any of these, by group, such as predictions and truth.
        box_format: xyxy, xywh or cxcywh; in pixels.

    Returns:
        The groups, and how many boxes were left out: those with a number that is not finite,
        and those over 1000 in a group.

    Raises:
        SchemaValidationError: Nothing of these.
    """
    check_choice(box_format, "box_format", BOX_FORMATS)
    groups = boxes if _is_grouped(boxes) else {_DEFAULT_BOXES: boxes}
    if len(groups) > _MOST_GROUPS:
        raise SchemaValidationError(f"boxes has {len(groups)} groups; at most {_MOST_GROUPS}")
    found: dict[str, Any] = {}
    left_out = 0
    for name, group in groups.items():
        where = f"boxes[{name!r:.60}]"
        kept: list[dict[str, Any]] = []
        for index, item in enumerate(_list_boxes(group, where)):
            box = _read_box(item, f"{where}[{index}]", str(box_format))
            if box is None or len(kept) >= _MOST_BOXES:
                left_out += 1
            else:
                kept.append(box)
        found[str(name)] = kept
    return found, left_out


def encode_masks(masks: Any, width: int, height: int) -> list[EncodedMask]:
    """Masks of an image as PNG files.

    Args:
        masks: Classes of the pixels: an array or tensor `(height, width)` of integers from 0 to
            65535 or of booleans, or a mapping of such, by name.
        width, height: Of the image.

    Raises:
        SchemaValidationError: Another shape than the image has, or no such numbers.
    """
    groups = masks if isinstance(masks, Mapping) else {_DEFAULT_MASK: masks}
    if len(groups) > _MOST_GROUPS:
        raise SchemaValidationError(f"masks has {len(groups)} masks; at most {_MOST_GROUPS}")
    return [_encode_mask(str(name), mask, width, height) for name, mask in groups.items()]


def describe_labels(labels: Any, argument: str = "class_labels") -> dict[str, str]:
    """Names of classes by their numbers, as JSON.

    Args:
        labels: A mapping of numbers to names, or names in the order of the numbers.
        argument: What a message calls it.

    Raises:
        SchemaValidationError: Neither, or a number that is none.
    """
    if isinstance(labels, (str, bytes)) or not isinstance(labels, Iterable):
        raise SchemaValidationError(
            f"{argument} must be names, or a mapping of numbers to names, "
            f"not {type(labels).__name__}"
        )
    pairs = labels.items() if isinstance(labels, Mapping) else enumerate(labels)
    named = {str(read_class(number, argument)): str(name)[:_MOST_LABEL] for number, name in pairs}
    if len(named) > _MOST_CLASSES:
        raise SchemaValidationError(f"{argument} has {len(named)} names; at most {_MOST_CLASSES}")
    return named


def read_class(value: Any, argument: str) -> int:
    """The number of a class, as a plain int.

    Raises:
        SchemaValidationError: Not a whole number.
    """
    try:
        number = value if isinstance(value, (int, float)) else float(value)
        if number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise SchemaValidationError(f"{argument}: the number of a class is {value!r:.60}")


def _is_grouped(boxes: Any) -> bool:
    return isinstance(boxes, Mapping) and not (
        _BOX in boxes or hasattr(boxes.get(_TORCHVISION), "shape") or "labels" in boxes
    )


def _list_boxes(group: Any, where: str) -> list[Any]:
    if isinstance(group, Mapping):
        if _BOX in group:
            return [group]
        return _join_columns(group, where)
    plain = group.tolist() if hasattr(group, "tolist") else group
    if isinstance(plain, (str, bytes)) or not isinstance(plain, Iterable):
        raise SchemaValidationError(f"{where} must be boxes, not {type(group).__name__}")
    return list(plain)


def _join_columns(group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """What torchvision's detectors return, as one mapping for each box."""
    columns: dict[str, list[Any]] = {}
    for key, name in (("boxes", _BOX), ("labels", "label"), ("scores", "score")):
        values = group.get(key)
        if values is not None:
            columns[name] = list(values.tolist() if hasattr(values, "tolist") else values)
    if _BOX not in columns or len({len(values) for values in columns.values()}) > 1:
        raise SchemaValidationError(
            f"{where} must have `boxes` and, where they are there, as many `labels` and `scores`"
        )
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _read_box(item: Any, where: str, box_format: str) -> dict[str, Any] | None:
    """One box; None where a number of it is not finite."""
    given = item if isinstance(item, Mapping) else {_BOX: item}
    sides: Any = given.get(_BOX)
    sides = sides.tolist() if hasattr(sides, "tolist") else sides
    if isinstance(sides, (str, bytes)) or not isinstance(sides, Sequence) or len(sides) != _SIDES:
        raise SchemaValidationError(f"{where} must have four numbers, got {sides!r:.80}")
    numbers = [_read_number(side, where) for side in sides]
    score = given.get("score")
    if score is not None:
        score = _read_number(score, f"{where}.score")
    if not all(map(math.isfinite, [*numbers, score or 0.0])):
        return None
    first, second, third, fourth = numbers
    if box_format == "xywh":
        numbers = [first, second, first + third, second + fourth]
    elif box_format == "cxcywh":
        numbers = [first - third / 2, second - fourth / 2, first + third / 2, second + fourth / 2]
    label: Any = given.get("label")
    label = label.item() if hasattr(label, "item") else label
    found: dict[str, Any] = {_BOX: numbers}
    if label is not None:
        is_plain = isinstance(label, int) and not isinstance(label, bool)
        found["label"] = label if is_plain else str(label)[:_MOST_LABEL]
    if score is not None:
        found["score"] = score
    return found


def _read_number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise SchemaValidationError(f"{where} must be numbers, got {value!r:.60}") from None


def _encode_mask(name: str, mask: Any, width: int, height: int) -> EncodedMask:
    import numpy as np

    pil = import_library("PIL.Image", "media", "log_image() with masks")
    where = f"masks[{name!r:.60}]"
    array: Array = np.squeeze(read_array(mask, where))
    if array.shape != (height, width):
        raise SchemaValidationError(
            f"{where} has the shape {array.shape}, but the image is {height} high and {width} wide"
        )
    numbers = np.where(np.isfinite(array), array, 0) if array.dtype.kind == "f" else array
    if numbers.dtype.kind not in "iuf" or (numbers != np.floor(numbers)).any():
        raise SchemaValidationError(
            f"{where} must hold the numbers of classes: whole ones, not {array.dtype}"
        )
    if numbers.min() < 0 or numbers.max() >= _BYTE * _BYTE:
        raise SchemaValidationError(
            f"{where} has classes from {numbers.min()} to {numbers.max()}; at most "
            f"{_BYTE * _BYTE - 1}"
        )
    classes = np.unique(numbers).astype(int).tolist()
    wide = numbers.astype(np.uint16)
    encoding = "L" if wide.max() < _BYTE else "RGB"
    if encoding == "L":
        pixels = wide.astype(np.uint8)
    else:
        pixels = np.stack([wide % _BYTE, wide // _BYTE, wide * 0], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    pil.fromarray(pixels).save(file, format="PNG", compress_level=2)
    return EncodedMask(name, file.getvalue(), classes[:_MOST_CLASSES], encoding)
