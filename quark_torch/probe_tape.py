"""What the hooks of one probed step share, and how compiled hooks are had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark_torch.kernel_reading import read_result
from quark_torch.layer_recording import LayerReading, LayerRecording
from quark_torch.partials import Wanted

if TYPE_CHECKING:
    pass

__all__ = ["OF_GRADIENTS", "PlainTape", "TapeReading"]

OF_GRADIENTS = Wanted(near_zero=0.0)


class PlainTape:
    """Counters of a probed step, as the compiled tape has them too.

    Attributes:
        is_open: Whether hooks still take anything.
        spent_ns: Time that the hooks took.
        calls: Calls of modules that were seen.
        saw_backward: Whether gradients came since the last forward.
        micro_batch: How many backward passes came before this forward.
    """

    __slots__ = ("calls", "is_open", "micro_batch", "saw_backward", "spent_ns")

    def __init__(self) -> None:
        self.is_open = True
        self.spent_ns = 0
        self.calls = 0
        self.saw_backward = False
        self.micro_batch = 0

    def close(self) -> None:
        """Take no more."""
        self.is_open = False


class TapeReading:
    """Makes the records of what compiled hooks have read, after the step."""

    __slots__ = ("_moment", "_recording", "tape")

    def __init__(self, recording: LayerRecording, moment: tuple[int, int | None]) -> None:
        self._recording = recording
        self._moment = moment
        self.tape: Any = None

    def __call__(self, number: int) -> None:
        """Make the record of a row of the tape."""
        (
            site,
            is_forward,
            call_index,
            micro_batch,
            backward_index,
            time_us,
            shape,
            element_count,
            units,
            result,
        ) = self.tape.read(number)
        wanted = OF_GRADIENTS
        if is_forward:
            # Of the units it matters only whether they were wanted.
            wanted = Wanted(site.near_zero, site.saturation)
        found = read_result(result, element_count, None if units < 0 else units, wanted)
        if found is None:
            return
        reading = LayerReading(
            self._recording,
            site.identity,
            "forward" if is_forward else "backward",
            self._moment,
            call_index,
            shape,
            None,
            micro_batch,
            backward_index,
            None,
            time_us,
        )
        self._recording._put(reading, found)
