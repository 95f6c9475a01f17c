"""Sound and moving pictures as files: WAV, and by PyAV, where it is there, MP4."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records.dataframes import import_library

if TYPE_CHECKING:
    from quark_core.records.columns import Array

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
                f"samples has integers from {low} to {high}; they must be of 16 bits, or floats "
                "from -1 to 1"
            )
        pcm = array.astype("<i2")
    elif array.dtype.kind == "f":
        pcm = _round_samples(array, notes)
    else:
        raise SchemaValidationError(f"samples must hold numbers, not {array.dtype}")
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
                        f"frames must have 2 pixels at least on each side, got {frame.shape}"
                    )
                stream = container.add_stream(
                    "libx264", rate=Fraction(rate).limit_denominator(1001)
                )
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
                size = width, height
            if (width, height) != size:
                raise SchemaValidationError(
                    f"frames[{count}] is {width}x{height}, but those before are "
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

    from quark_core.artifacts.images import read_pixels

    if isinstance(frames, (str, bytes, dict)) or not isinstance(frames, Iterable):
        raise SchemaValidationError(
            f"frames must be an array, frames or a path, not {type(frames).__name__}"
        )
    for number, frame in enumerate(frames):
        try:
            pixels = read_pixels(frame)
        except SchemaValidationError as error:
            told = str(error).removeprefix("image").removesuffix(" (normalize=True spreads them)")
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
            f"fps must be a number above 0 and up to {_MOST_FPS:.0f}, got {value!r:.40}"
        )
    return fps


def _read_number(value: Any) -> float | None:
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
