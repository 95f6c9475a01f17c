"""Plots and pixels as the bytes of an image file, or as JSON."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.dataframes import import_library

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
            + ("; of a batch log each image, or a grid of them" if array.ndim == 4 else "")
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
                f"image has integers from {array.min()} to {array.max()}; an image has 0 to 255 "
                "(normalize=True spreads them)"
            )
        return np.ascontiguousarray(array.astype(np.uint8)), notes
    if array.dtype.kind not in "fiu":
        raise SchemaValidationError(f"image must hold numbers, not {array.dtype}")
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
