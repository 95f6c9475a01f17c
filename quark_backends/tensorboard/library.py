"""TensorBoard's own classes, imported when the mirror opens."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quark_core.api import BackendUnavailable, BackendUnusable, importing

_MODULES = {
    "event": "tensorboard.compat.proto.event_pb2",
    "summary": "tensorboard.compat.proto.summary_pb2",
    "checksum": "tensorboard.compat.tensorflow_stub.pywrap_tensorflow",
    "text": "tensorboard.plugins.text.summary_v2",
    "hparams": "tensorboard.plugins.hparams.summary_v2",
    "hparams_data": "tensorboard.plugins.hparams.plugin_data_pb2",
    "hparams_metadata": "tensorboard.plugins.hparams.metadata",
    "hparams_api": "tensorboard.plugins.hparams.api_pb2",
}
# float32 is all that a TensorBoard scalar has.
_LARGEST = 3.4028234663852886e38


class Library:
    """Makes TensorBoard's messages.

    Raises:
        BackendUnusable: The library is not installed.
        BackendUnavailable: It cannot be imported.
    """

    def __init__(self) -> None:
        try:
            with importing():
                self._modules: dict[str, Any] = {
                    name: importlib.import_module(module) for name, module in _MODULES.items()
                }
        except ModuleNotFoundError as error:
            # A folder of that name counts as a package, in which nothing is found.
            if error.name not in ("tensorboard", "tensorboard.compat"):
                raise _broken(error) from error
            raise BackendUnusable(
                'tensorboard is not installed: pip install "quark-tracker[tensorboard]"; '
                "the records wait",
                backend="tensorboard",
            ) from error
        except Exception as error:
            # A wrong protobuf ends in a TypeError, for one.
            raise _broken(error) from error

    def compute_checksum(self, data: bytes) -> int:
        """The checksum of the parts of an event file."""
        return int(self._modules["checksum"].masked_crc32c(data))

    def encode_header(self, time_s: float) -> bytes:
        """The event that an event file begins with."""
        event = self._modules["event"].Event(wall_time=time_s, file_version="brain.Event:2")
        return bytes(event.SerializeToString())

    def encode_event(self, time_s: float, step: int, summary: Any) -> bytes:
        """A summary at a step."""
        event = self._modules["event"].Event(wall_time=time_s, step=step, summary=summary)
        # Maps of a message have no order of their own, and the bytes must be the same each time.
        return bytes(event.SerializeToString(deterministic=True))

    def make_scalar(self, name: str, value: float) -> Any:
        """One value of a curve; beyond float32 it becomes infinite."""
        if abs(value) > _LARGEST:
            value = float("inf") if value > 0 else float("-inf")
        return self._summary([self._modules["summary"].Summary.Value(tag=name, simple_value=value)])

    def make_text(self, name: str, text: str) -> Any:
        """A text, shown as Markdown."""
        return self._modules["text"].text_pb(name, text)

    def make_histogram(self, name: str, counts: Sequence[int], edges: Sequence[float]) -> Any:
        """A histogram; its sums are reckoned from the middle of each bin."""
        summary = self._modules["summary"]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        histogram = summary.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(c * middle**2 for c, middle in zip(counts, middles, strict=True)),
            # A first bin without content, so that the first edge is not lost.
            bucket_limit=list(edges),
            bucket=[0, *counts],
        )
        return self._summary([summary.Summary.Value(tag=name, histo=histogram)])

    def make_image(self, name: str, data: bytes, width: int, height: int) -> Any:
        """An encoded image."""
        summary = self._modules["summary"].Summary
        image = summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        return self._summary([summary.Value(tag=name, image=image)])

    def make_hparams(self, values: Mapping[str, Any], run_id: str, time_s: float) -> Any:
        """The hyperparameters of a run."""
        return self._modules["hparams"].hparams_pb(
            dict(values), trial_id=run_id, start_time_secs=time_s
        )

    def make_session_end(self, time_s: float, *, completed: bool) -> Any:
        """The end of a run, as the page of hyperparameters shows it."""
        api, data = self._modules["hparams_api"], self._modules["hparams_data"]
        status = api.STATUS_SUCCESS if completed else api.STATUS_FAILURE
        end = data.SessionEndInfo(status=status, end_time_secs=time_s)
        metadata = self._modules["hparams_metadata"]
        content = data.HParamsPluginData(session_end_info=end)
        value = self._modules["summary"].Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(content),
            tensor=metadata.NULL_TENSOR,
        )
        return self._summary([value])

    def _summary(self, values: list[Any]) -> Any:
        return self._modules["summary"].Summary(value=values)


def _broken(error: Exception) -> BackendUnavailable:
    return BackendUnavailable(
        f"TensorBoard cannot be imported ({type(error).__name__}: {error})",
        backend="tensorboard",
    )
