"""Media as the bytes of files: images and their annotations, sound, video, point clouds."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quark_core.errors import SchemaValidationError, import_library
from quark_core.records.checks import check_choice

if TYPE_CHECKING:
    from quark_core.records.columns import Array

_LAYOUTS = ("HWC", "CHW", "HW")
_CHANNELS = (1, 3, 4)
_NUMBER_MODES = ("F", "I")
# What PNG can hold as it is; anything else becomes RGB.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_WITH_ALPHA = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}


class EncodedImage(NamedTuple):
    """An image file in memory, and what it is."""

    data: bytes
    extension: str
    metadata: dict[str, Any]


def encode_image(image: Any, layout: str | None, *, normalize: bool) -> EncodedImage:
    """A PIL image, a numpy array or a torch tensor as a PNG file.

    An array has the layout HW, HWC or CHW with 1, 3 or 4 channels. Where none
    is given, numpy's is HWC and torch's CHW, unless only the other one fits.
    Integers and booleans stand for themselves (0 to 255, or False and True),
    floats for 0 to 1. Floats beyond that are cut off and NaN becomes 0, which
    the metadata tells (`clipped`, `non_finite`); `normalize` instead spreads
    the finite values from the smallest to the largest.

    Raises:
        SchemaValidationError: Not an image of these kinds, or of another shape.
        MissingLibraryError: Pillow is not installed.
    """
    pil = import_library("PIL.Image", "media", "log_image()")
    if isinstance(image, pil.Image):
        if image.mode not in _NUMBER_MODES:
            return _encode_pil(image, {})
        # Numbers of a width that PNG has not stand for what those of an array do.
        image = _read_numbers(image)
    pixels, notes = _read_bytes(image, layout, normalize=normalize)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return _encode_pil(pil.fromarray(pixels), notes)


def read_pixels(image: Any) -> Array:
    """The pixels of an image as bytes: an array of height, width and, unless gray, channels.

    Args:
        image: A PIL image, a numpy array or a torch tensor, as of `encode_image`.

    Raises:
        SchemaValidationError: Not an image of these kinds, or of another shape.
    """
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        image = _read_numbers(image.convert("RGB"))
    return _read_bytes(image, None, normalize=False)[0]


def _read_bytes(image: Any, layout: str | None, *, normalize: bool) -> tuple[Array, dict[str, Any]]:
    array, default = _to_array(image)
    array = _arrange(array, _choose_layout(array, layout, default))
    return _to_bytes(array, normalize=normalize)


def identify_image(path: Any) -> tuple[str, dict[str, Any]]:
    """Extension and metadata of an image file, which is read as far as its head.

    Raises:
        SchemaValidationError: Not an image file.
        MissingLibraryError: Pillow is not installed.
    """
    pil = import_library("PIL.Image", "media", "log_image()")
    try:
        with pil.open(path) as image:
            form = str(image.format or "")
            return form.lower(), _describe(image, pil.MIME.get(form, f"image/{form.lower()}"))
    except pil.DecompressionBombError as error:
        raise SchemaValidationError(f"image {path}: {error}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise SchemaValidationError(f"image {path} is not an image file: {error}") from error


def _read_numbers(image: Any) -> Array:
    import numpy as np

    try:
        return np.asarray(image)
    except Exception as error:
        raise SchemaValidationError(
            f"image cannot be read: {type(error).__name__}: {error}"
        ) from error


def _encode_pil(image: Any, notes: dict[str, Any]) -> EncodedImage:
    file = io.BytesIO()
    try:
        if image.mode not in _PNG_MODES:
            image = image.convert(_WITH_ALPHA.get(image.mode, "RGB"))
        # Little is saved by compressing harder, and a training loop waits for it.
        image.save(file, format="PNG", compress_level=2)
    except Exception as error:
        # Its file is read only now, and may be damaged in any way.
        raise SchemaValidationError(
            f"image cannot be drawn: {type(error).__name__}: {error}"
        ) from error
    return EncodedImage(file.getvalue(), "png", {**_describe(image, "image/png"), **notes})


def _describe(image: Any, media_type: str) -> dict[str, Any]:
    return {
        "media_type": media_type,
        "width": image.width,
        "height": image.height,
        "mode": image.mode,
    }


def _to_array(image: Any) -> tuple[Array, str]:
    """The array of an image, and the layout that its library is used to."""
    import numpy as np

    if type(image).__module__.partition(".")[0] == "torch" and hasattr(image, "detach"):
        try:
            tensor = image.detach().cpu()
            # numpy knows no bfloat16.
            array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        except Exception as error:
            # A tensor may have no numbers, or not as an array.
            raise SchemaValidationError(f"image cannot be read as an array: {error}") from error
        return np.asarray(array), "CHW"
    if not isinstance(image, np.ndarray):
        raise SchemaValidationError(
            "image must be a PIL image, a numpy array, a torch tensor, a matplotlib figure or a "
            f"path, not {type(image).__name__}"
        )
    return image, "HWC"


def _choose_layout(array: Array, layout: str | None, default: str) -> str:
    if layout is not None:
        check_choice(layout, "layout", _LAYOUTS)
        fits = array.ndim == 2 if layout == "HW" else _fits(array, layout)
    else:
        layout = "HW" if array.ndim == 2 else default
        fits = array.ndim == 2 or _fits(array, layout)
        if not fits:
            layout = "CHW" if default == "HWC" else "HWC"
            fits = _fits(array, layout)
    if not fits or 0 in array.shape:
        raise SchemaValidationError(
            "image must have the shape (height, width), or three dimensions with 1, 3 or 4 "
            f"channels, got {array.shape}"
            + ("; log each image of the batch, or one grid of them" if array.ndim == 4 else "")
        )
    return layout


def _fits(array: Array, layout: str) -> bool:
    return array.ndim == 3 and array.shape[layout.index("C")] in _CHANNELS


def _arrange(array: Array, layout: str) -> Array:
    return array.transpose(1, 2, 0) if layout == "CHW" else array


def _to_bytes(array: Array, *, normalize: bool) -> tuple[Array, dict[str, Any]]:
    import numpy as np

    notes: dict[str, Any] = {}
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255, notes
    if array.dtype.kind in "iu" and not normalize:
        if array.min() < 0 or array.max() > 255:
            raise SchemaValidationError(
                f"image has integers from {array.min()} to {array.max()}, but the allowed range "
                "is 0 to 255. normalize=True rescales them"
            )
        return np.ascontiguousarray(array.astype(np.uint8)), notes
    if array.dtype.kind not in "fiu":
        raise SchemaValidationError(f"image must contain numbers, not {array.dtype}")
    values = array.astype(np.float64)
    finite = np.isfinite(values)
    if not finite.all():
        notes["non_finite"] = int(values.size - finite.sum())
        values = np.where(finite, values, 0.0)
    if normalize:
        # Halved, so that no difference is larger than a float can be.
        values /= 2.0
        low, high = values[finite].min(initial=np.inf), values[finite].max(initial=-np.inf)
        values = (values - low) / (high - low) if high > low else np.zeros_like(values)
        values[~finite] = 0.0
    elif values.min() < 0.0 or values.max() > 1.0:
        notes["clipped"] = int(((values < 0.0) | (values > 1.0)).sum())
        values = values.clip(0.0, 1.0)
    return np.ascontiguousarray(np.rint(values * 255.0).astype(np.uint8)), notes


MATPLOTLIB_FORMATS = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}
"""Format of a matplotlib figure -> media type of its file."""

_MAX_DEPTH = 8  # axes may be in a part of a figure, which may be in a part of one


def find_matplotlib_figure(figure: Any) -> Any | None:
    """The matplotlib figure that an object is, or that its axes are of; else None."""
    candidate = figure
    for _ in range(_MAX_DEPTH):
        module = type(candidate).__module__.partition(".")[0]
        if module == "matplotlib" and hasattr(candidate, "savefig"):
            return candidate
        candidate = getattr(candidate, "figure", None)
    return None


def is_cell_image(value: Any) -> bool:
    """Whether a value in a table is an image, and no list of numbers."""
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        return True
    if type(value).__module__.partition(".")[0] == "matplotlib":
        return find_matplotlib_figure(value) is not None
    is_array = hasattr(value, "dtype") and getattr(value, "ndim", 0) in (2, 3)
    return is_array and str(value.dtype).removeprefix("torch.") == "uint8"


def is_plotly_figure(figure: Any) -> bool:
    """Whether an object is a figure of plotly."""
    return type(figure).__module__.partition(".")[0] == "plotly" and hasattr(figure, "to_json")


def draw_matplotlib(figure: Any, file_format: str, dpi: float) -> bytes:
    """A matplotlib figure as a file.

    Raises:
        SchemaValidationError: An unknown format, or a figure that cannot be drawn.
    """
    check_choice(file_format, "file_format", MATPLOTLIB_FORMATS)
    file = io.BytesIO()
    try:
        figure.savefig(file, format=file_format, dpi=dpi)
    except Exception as error:
        # Text in a figure may be any mathematics, and drawing it may raise anything.
        raise SchemaValidationError(
            f"figure cannot be drawn: {type(error).__name__}: {error}"
        ) from error
    return file.getvalue()


_MOST_RATE_HZ = 768_000
_MOST_CHANNELS = 32
_MOST_FPS = 1_000.0
_FULL_SCALE = 32_767
_SAMPLE_BYTES = 2


def encode_audio(samples: Any, sample_rate_hz: object) -> tuple[bytes, dict[str, Any]]:
    """Samples as a WAV file of 16 bits, and what is known of it.

    Args:
        samples: A numpy array, a torch tensor or a sequence: `(samples,)`, `(samples, channels)`
            or `(channels, samples)`, the shorter side being the channels. Floats from -1 to 1,
            or integers of 16 bits.
        sample_rate_hz: Samples per second.

    Raises:
        SchemaValidationError: No such samples, or no such rate.
    """
    import numpy as np

    rate_hz = _check_rate(sample_rate_hz)
    array = read_array(samples, "samples")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim == 2 and array.shape[1] > _MOST_CHANNELS >= array.shape[0]:
        array = array.T
    if array.ndim != 2 or not 0 < array.shape[1] <= _MOST_CHANNELS:
        raise SchemaValidationError(
            "samples must have the shape (samples,) or (samples, channels) with 1 to "
            f"{_MOST_CHANNELS} channels, got {np.shape(samples)}"
        )
    notes: dict[str, Any] = {}
    if array.dtype.kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < -_FULL_SCALE - 1 or high > _FULL_SCALE:
            raise SchemaValidationError(
                f"samples has integers from {low} to {high}. Use 16-bit integers, or floats "
                "from -1 to 1"
            )
        pcm = array.astype("<i2")
    elif array.dtype.kind == "f":
        pcm = _round_samples(array, notes)
    else:
        raise SchemaValidationError(f"samples must contain numbers, not {array.dtype}")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(pcm.shape[1])
        writer.setsampwidth(_SAMPLE_BYTES)
        writer.setframerate(rate_hz)
        writer.writeframes(np.ascontiguousarray(pcm).tobytes())
    facts = {
        "media_type": "audio/wav",
        "sample_rate_hz": rate_hz,
        "channels": pcm.shape[1],
        "samples": pcm.shape[0],
        "duration_s": pcm.shape[0] / rate_hz,
    }
    return file.getvalue(), {**facts, **notes}


def encode_video(frames: Any, fps: object, target: Path) -> dict[str, Any]:
    """Frames as an MP4 file (H.264) that browsers play; one frame is in memory at a time.

    Args:
        frames: An array `(frames, height, width[, channels])`, or frames one after the other:
            arrays or PIL images of one size. Integers from 0 to 255, or floats from 0 to 1. Of
            torch `(frames, channels, height, width)` as well.
        fps: Frames per second.
        target: The file to write.

    Returns:
        What is known of it.

    Raises:
        SchemaValidationError: No such frames, or none at all.
        MissingLibraryError: PyAV is not installed.
        OSError: The file cannot be written.
    """
    rate = _check_fps(fps)
    av = import_library("av", "media", "log_video() of frames")
    from fractions import Fraction

    count = 0
    size: tuple[int, int] | None = None
    with av.open(str(target), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream: Any = None
        for frame in _iterate_frames(frames):
            height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
            if stream is None:
                if not height or not width:
                    raise SchemaValidationError(
                        f"frames must have at least 2 pixels on each side, got {frame.shape}"
                    )
                stream = container.add_stream(
                    "libx264", rate=Fraction(rate).limit_denominator(1001)
                )
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
                size = width, height
            if (width, height) != size:
                raise SchemaValidationError(
                    f"frames[{count}] is {width}x{height}, but the frames before it are "
                    f"{size[0] if size else 0}x{size[1] if size else 0}"
                )
            # H.264 has even sides: an odd row or column at the end is left out.
            picture = av.VideoFrame.from_ndarray(frame[:height, :width], format="rgb24")
            for packet in stream.encode(picture):
                container.mux(packet)
            count += 1
        if stream is None or size is None:
            raise SchemaValidationError("frames must not be empty")
        for packet in stream.encode():
            container.mux(packet)
    return {
        "media_type": "video/mp4",
        "fps": rate,
        "frames": count,
        "width": size[0],
        "height": size[1],
        "duration_s": count / rate,
    }


def _iterate_frames(frames: Any) -> Iterator[Array]:
    """Each frame as an array of bytes: height, width, RGB."""
    import numpy as np

    if isinstance(frames, (str, bytes, dict)) or not isinstance(frames, Iterable):
        raise SchemaValidationError(
            f"frames must be an array, a sequence of frames or a path, not {type(frames).__name__}"
        )
    for number, frame in enumerate(frames):
        try:
            pixels = read_pixels(frame)
        except SchemaValidationError as error:
            told = str(error).removeprefix("image").removesuffix(". normalize=True rescales them")
            raise SchemaValidationError(f"frames[{number}]{told}") from None
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        yield np.ascontiguousarray(pixels[:, :, :3])


def _round_samples(array: Array, notes: dict[str, Any]) -> Array:
    import numpy as np

    finite = np.isfinite(array)
    if not finite.all():
        notes["non_finite"] = int(array.size - finite.sum())
        array = np.where(finite, array, 0.0)
    clipped = int((np.abs(array) > 1.0).sum())
    if clipped:
        notes["clipped"] = clipped
        array = array.clip(-1.0, 1.0)
    return np.rint(array.astype(np.float64) * _FULL_SCALE).astype("<i2")


def read_array(values: Any, argument: str) -> Array:
    """A numpy array of an array, a tensor or a sequence.

    Raises:
        SchemaValidationError: It is none.
    """
    import numpy as np

    try:
        if type(values).__module__.partition(".")[0] == "torch" and hasattr(values, "detach"):
            tensor = values.detach().cpu()
            return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())
        array = np.asarray(values)
    except Exception as error:
        raise SchemaValidationError(f"{argument} cannot be read as an array: {error}") from error
    return array.astype(np.float64) if array.dtype == np.bool_ else array


def _check_rate(value: object) -> int:
    rate_hz = _read_number(value)
    if rate_hz is None or not 0 < rate_hz <= _MOST_RATE_HZ or rate_hz != int(rate_hz):
        raise SchemaValidationError(
            f"sample_rate_hz must be an integer from 1 to {_MOST_RATE_HZ}, got {value!r:.40}"
        )
    return int(rate_hz)


def _check_fps(value: object) -> float:
    fps = _read_number(value)
    if fps is None or not 0 < fps <= _MOST_FPS:
        raise SchemaValidationError(
            f"fps must be a number above 0 and at most {_MOST_FPS:.0f}, got {value!r:.40}"
        )
    return fps


def _read_number(value: Any) -> float | None:
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


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
            f"{argument} must be a list of names, or a mapping of class numbers to names, not "
            f"{type(labels).__name__}"
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
    raise SchemaValidationError(f"{argument}: class numbers must be integers, got {value!r:.60}")


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
            f"{where} must have `boxes`, and `labels` and `scores` of the same length or none"
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
    numbers = [_read_side(side, where) for side in sides]
    score = given.get("score")
    if score is not None:
        score = _read_side(score, f"{where}.score")
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


def _read_side(value: Any, where: str) -> float:
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
            f"{where} must contain integers, the class numbers, not {array.dtype}"
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


_AXES = 3
_WITH_VALUE, _WITH_COLOR = 4, 6
_FULL_BYTE = 255


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
            "points must have the shape (points, 3), (points, 4) with a value in column 4, or "
            f"(points, 6) with colors, got {array.shape}"
        )
    if array.dtype.kind not in "fiu":
        raise SchemaValidationError(f"points must contain numbers, not {array.dtype}")
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
            f"colors must have the shape ({count}, 3), one row for each point, got {array.shape}"
        )
    values = np.nan_to_num(array.astype(np.float64))
    # Of six columns of floats the colours may be bytes all the same.
    if array.dtype.kind == "f" and values.max(initial=0.0) <= 1.0:
        values = values * _FULL_BYTE
    return np.rint(values.clip(0, _FULL_BYTE)).astype(np.uint8)
