"""The values of event files: what is no plain scalar, told by the plugin that it is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quark.importing.foreign import ForeignFile, PointList
from quark.importing.histograms import make_histogram
from quark.importing.losses import Losses

_UNKNOWN_PLUGIN = "its kind ({}) has no place in a run"
_PLAIN_PLUGIN = ""


class Taker(Protocol):
    """Where values go."""

    points: PointList
    files: list[ForeignFile]
    size_bytes: int


class ValueReader:
    """Reads values of one run.

    Args:
        plugins: Name of a tag -> plugin of its tensors, as far as it is known already.
        losses: Told of what cannot be taken.

    Attributes:
        plugins: The same, with what was learnt since.
        config: Hyperparameters.
        losses: As given.
    """

    def __init__(self, plugins: Mapping[str, str], losses: Losses) -> None:
        self.plugins: dict[str, str] = dict(plugins)
        self.config: dict[str, Any] = {}
        self.losses = losses
        self._names: dict[str, str] = {}
        self._rename: Callable[[str], str] = str

    def begin_folder(self, rename: Callable[[str], str]) -> None:
        """What follows is of another folder.

        Args:
            rename: The name of a tag in the run.
        """
        self._rename, self._names = rename, {}

    def name(self, tag: str) -> str:
        """The name of a tag in the run."""
        known = self._names.get(tag)
        if known is None:
            known = self._names[tag] = self._rename(tag)
        return known

    def read(self, value: Any, step: int, time_s: float, taker: Taker) -> None:
        """Read a value that is not in `simple_value`."""
        form = value.WhichOneof("value")
        name = self.name(value.tag)
        plugin = value.metadata.plugin_data.plugin_name
        if plugin == "hparams":
            self._read_hparams(value.metadata.plugin_data.content)
            return
        try:
            if form == "histo":
                self._read_histo(value.histo, name, step, time_s, taker)
            elif form == "image":
                self._add_image(value.image.encoded_image_string, name, step, time_s, taker)
            elif form == "audio":
                _add(taker, "audio", name, value.audio.encoded_audio_string, step, time_s)
            elif form == "tensor":
                self._read_tensor(value, name, step, time_s, taker)
            else:
                self.losses.add(form or "value", name, _UNKNOWN_PLUGIN.format(form or "none"))
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            self.losses.add(form or "value", name, f"it cannot be read: {error}")

    def _read_tensor(self, value: Any, name: str, step: int, time_s: float, taker: Taker) -> None:
        from tensorboard.util import tensor_util

        plugin = value.metadata.plugin_data.plugin_name
        if plugin:
            self.plugins[name] = plugin
        plugin = self.plugins.get(name, _PLAIN_PLUGIN)
        count = math.prod(dimension.size for dimension in value.tensor.tensor_shape.dim)
        if count > max(value.tensor.ByteSize(), 1):
            raise ValueError(f"it says that it has {count} elements, and does not hold them")
        array = tensor_util.make_ndarray(value.tensor)
        is_number = array.dtype.kind in "fiub"
        if plugin in ("scalars", _PLAIN_PLUGIN) and is_number and array.size == 1:
            taker.points.add(name, step, float(array.reshape(())), time_s)
        elif plugin == "histograms" and array.ndim == 2 and array.shape[1] == 3:
            rows = array.astype(float)
            self._add_histogram(
                name, [*rows[:1, 0], *rows[:, 1]], rows[:, 2].tolist(), step, time_s, taker
            )
        elif plugin == "images":
            # The first two are width and height.
            for place, data in enumerate(array.reshape(-1)[2:]):
                shown = name if array.size <= 3 else f"{name}/{place}"
                self._add_image(bytes(data), shown, step, time_s, taker)
        elif plugin == "audio":
            clips = array.reshape(len(array), -1)[:, 0] if array.ndim else array.reshape(-1)
            for place, data in enumerate(clips):
                shown = name if len(clips) == 1 else f"{name}/{place}"
                _add(taker, "audio", shown, bytes(data), step, time_s)
        elif plugin == "text":
            parts = [bytes(part).decode("utf-8", "replace") for part in array.reshape(-1)]
            _add(taker, "markdown", name, "\n\n".join(parts).encode(), step, time_s, "text")
        elif plugin == "pr_curves" and array.ndim == 2:
            self._add_curve(array, name, step, time_s, taker)
        else:
            told = plugin or f"a tensor of {array.dtype}, shape {array.shape}"
            self.losses.add("tensor", name, _UNKNOWN_PLUGIN.format(told))

    def _read_histo(self, histo: Any, name: str, step: int, time_s: float, taker: Taker) -> None:
        """A histogram of the old form: its outermost edges say nothing, the extremes do."""
        counts, limits = list(histo.bucket), list(histo.bucket_limit)
        filled = [place for place, count in enumerate(counts) if count > 0]
        if not filled:
            self.losses.add("histogram", name, "it is empty")
            return
        first, last = filled[0], filled[-1]
        edges = [histo.min, *limits[first:last], histo.max]
        self._add_histogram(name, edges, counts[first : last + 1], step, time_s, taker)

    def _add_histogram(
        self,
        name: str,
        edges: list[float],
        counts: list[float],
        step: int,
        time_s: float,
        taker: Taker,
    ) -> None:
        made = make_histogram(name, edges, counts, step=step, time_us=round(time_s * 1e6))
        if made is None:
            self.losses.add("histogram", name, "it is empty")
        else:
            taker.files.append(made)

    def _add_image(self, data: bytes, name: str, step: int, time_s: float, taker: Taker) -> None:
        _add(taker, "image", name, data, step, time_s)

    def _add_curve(self, array: Any, name: str, step: int, time_s: float, taker: Taker) -> None:
        import msgspec

        columns = ["true_positives", "false_positives", "true_negatives", "false_negatives"]
        columns = [*columns, "precision", "recall"][: len(array)]
        table = {"columns": columns, "rows": array.T.astype(float).tolist()}
        _add(taker, "table", name, msgspec.json.encode(table), step, time_s, "json")

    def _read_hparams(self, content: bytes) -> None:
        from google.protobuf.message import DecodeError
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        try:
            data = HParamsPluginData.FromString(content)
        except DecodeError as error:
            self.losses.add("hparams", "hparams", f"they cannot be decoded: {error}")
            return
        if data.WhichOneof("data") != "session_start_info":
            return
        for key, value in data.session_start_info.hparams.items():
            form = value.WhichOneof("kind")
            found = (
                getattr(value, form)
                if form in ("number_value", "string_value", "bool_value")
                else None
            )
            if isinstance(found, float) and found.is_integer() and abs(found) < 2**53:
                # Numbers of this form are floats all, those of an int too.
                found = int(found)
            self.config[key] = found


def _add(
    taker: Taker,
    artifact_type: str,
    name: str,
    data: bytes,
    step: int,
    time_s: float,
    payload_format: str = "bytes",
) -> None:
    taker.size_bytes += len(data)
    taker.files.append(
        ForeignFile(
            artifact_type=artifact_type,
            name=name,
            content=data,
            payload_format=payload_format,
            step=None if step < 0 else step,
            time_us=round(time_s * 1e6),
        )
    )
