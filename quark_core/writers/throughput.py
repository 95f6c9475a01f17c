"""What a training gets done: tokens, samples and FLOPs per second, and the share of the peak."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, TypedDict

from quark_core.delivery.metric_rows import MetricKey
from quark_core.errors import SchemaValidationError
from quark_core.ranks.launches import detect_rank
from quark_core.records.json_object import JsonObject
from quark_core.records.names import split_name
from quark_core.runs.open_run import OpenRun
from quark_core.system.hardware.peak_flops import PRECISIONS, find_peak_flops, read_precision
from quark_core.writers.scalars import to_float

_log = logging.getLogger("quark")

Amount = float | Callable[[], float | None] | None
"""What a step does of something: a number, or a function that says it at the end of the step."""


class StepRates(TypedDict, total=False):
    """What `SystemTelemetry` takes of what steps do."""

    tokens_per_step: Amount
    samples_per_step: Amount
    flops_per_step: Amount | Literal["model"]
    flops_per_token: float | None
    precision: object
    peak_flops_per_s: float | None


THROUGHPUT_KEYS = {
    "tokens": "system/runtime/tokens_per_s",
    "samples": "system/runtime/samples_per_s",
    "flops": "system/runtime/flops_per_s",
    "mfu": "system/runtime/mfu_percent",
}
"""What is counted -> the metric of its rate; `mfu` is the share of the peak, in percent."""

_KEYS = {name: MetricKey(key, *split_name(key)) for name, key in THROUGHPUT_KEYS.items()}
_COUNTED = ("tokens", "samples", "flops")
_PERCENT = 100.0


def make_throughput(
    run: OpenRun,
    *,
    tokens_per_step: Amount = None,
    samples_per_step: Amount = None,
    flops_per_step: Amount = None,
    flops_per_token: float | None = None,
    precision: object = "bf16",
    peak_flops_per_s: float | None = None,
) -> Throughput:
    """What counts for one writer.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    amounts = {"tokens": tokens_per_step, "samples": samples_per_step, "flops": flops_per_step}
    for name, amount in amounts.items():
        if amount is not None and not callable(amount):
            amounts[name] = _check_amount(amount, f"{name}_per_step")
    if flops_per_token is not None:
        if flops_per_step is not None:
            raise SchemaValidationError("give flops_per_step or flops_per_token, not both")
        flops_per_token = _check_amount(flops_per_token, "flops_per_token")
    known = read_precision("bf16" if precision is None else precision)
    if known is None:
        raise SchemaValidationError(
            f"precision must be one of {', '.join(PRECISIONS)}, or a torch dtype, "
            f"got {str(precision)[:40]!r}"
        )
    if peak_flops_per_s is not None:
        peak_flops_per_s = _check_amount(peak_flops_per_s, "peak_flops_per_s")
        if not peak_flops_per_s:
            raise SchemaValidationError("peak_flops_per_s must be above 0")
    return Throughput(run, amounts, flops_per_token, known, peak_flops_per_s)


class Throughput:
    """Counts what steps do, and says at recorded steps how much that is for each second.

    A rate is over the time since the recorded step before, in which waiting for
    data and whatever stands between two steps counts as well. Counts are of this process.
    """

    def __init__(
        self,
        run: OpenRun,
        amounts: dict[str, Any],
        flops_per_token: float | None,
        precision: str,
        peak_flops_per_s: float | None,
    ) -> None:
        self._run = run
        self._amounts = amounts
        self._flops_per_token = flops_per_token
        self._precision = precision
        self._peak = peak_flops_per_s
        self._is_peak_known = peak_flops_per_s is not None
        self._device = "given by hand" if peak_flops_per_s is not None else ""
        self._has_told = False
        self.begin()

    def begin(self) -> None:
        """Count anew: of a new writer, the first one or a forked child's."""
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._times_ms: float | None = 0.0
        self._done: dict[str, float] = {}
        # Of what a step since then did not know, a rate would say too little.
        self._unknown: set[str] = set()

    def count_step(
        self, counted: dict[str, float] | None, start_s: float | None, step_time_ms: float | None
    ) -> None:
        """A step has ended.

        Args:
            counted: What the step itself has said that it did.
            start_s: When it began, by `perf_counter`, where that is known.
            step_time_ms: How long it took, where the caller knows.
        """
        amounts = self._weigh_step(counted or {})
        with self._lock:
            if self._since_s is None:
                self._since_s = perf_counter() if start_s is None else start_s
                if start_s is None and step_time_ms is None:
                    # What was done in a time that nobody knows says nothing.
                    return
            if step_time_ms is None:
                self._times_ms = None
            elif self._times_ms is not None:
                self._times_ms += step_time_ms
            for name, amount in amounts.items():
                self._done[name] = self._done.get(name, 0.0) + amount

    def take_rates(self, gpu_name: Callable[[], str | None]) -> tuple[list[MetricKey], list[float]]:
        """The metrics of a recorded step and their values; the next ones count from here.

        Args:
            gpu_name: What the device is called, where that is known by now.
        """
        with self._lock:
            now_s = perf_counter()
            done, self._done = self._done, {}
            unknown, self._unknown = self._unknown, set()
            since_s, self._since_s = self._since_s, now_s
            times_ms, self._times_ms = self._times_ms, 0.0
        seconds = 0.0
        if times_ms:
            seconds = times_ms / 1000.0
        elif since_s is not None:
            seconds = now_s - since_s
        if seconds <= 0.0:
            return [], []
        rates = {name: done[name] / seconds for name in done if name not in unknown}
        if "flops" in rates:
            peak = self._find_peak(gpu_name)
            if peak is not None:
                rates["mfu"] = _PERCENT * rates["flops"] / peak
        if rates:
            self._tell(rates)
        return [_KEYS[name] for name in rates], list(rates.values())

    def _weigh_step(self, counted: dict[str, float]) -> dict[str, float]:
        done = dict(counted)
        for name in _COUNTED:
            amount = self._amounts[name]
            if name in done or amount is None:
                continue
            if callable(amount):
                amount = self._ask(name, amount)
            if amount is None:
                self._unknown.add(name)
            else:
                done[name] = amount
        if self._flops_per_token is not None and "flops" not in done and "tokens" in done:
            done["flops"] = self._flops_per_token * done["tokens"]
        return done

    def _ask(self, name: str, function: Callable[[], float | None]) -> float | None:
        try:
            amount = function()
            return None if amount is None else _check_amount(amount, f"{name}_per_step")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            self._amounts[name] = None
            _log.warning(
                "telemetry: %s per second are not measured: %s_per_step raised %s: %.200s",
                name, name, type(error).__name__, error,
            )  # fmt: skip
            return None

    def _find_peak(self, gpu_name: Callable[[], str | None]) -> float | None:
        if self._is_peak_known:
            return self._peak
        name = gpu_name()
        if name is None:
            # The first reading of the machine may still be on its way.
            return None
        self._is_peak_known = True
        self._device = name
        self._peak = find_peak_flops(name, self._precision)
        if self._peak is None:
            message = (
                f"the peak of {name!r} with {self._precision} is not known, so that there is no "
                "MFU: give SystemTelemetry(peak_flops_per_s=…)"
            )
            _log.warning("telemetry: %s", message)
            payload = JsonObject({"message": message, "device": name})
            self._run.emit_event("mfu_unknown", "info", payload=payload)
        return self._peak

    def _tell(self, rates: dict[str, float]) -> None:
        """Say once what the figures are held against."""
        if self._has_told or ("flops" in rates and not self._is_peak_known):
            return
        self._has_told = True
        payload: dict[str, Any] = {
            "counted": [name for name in _COUNTED if name in rates],
            "world_size": detect_rank().world_size,
        }
        if "mfu" in rates:
            payload |= {
                "device": self._device,
                "precision": self._precision,
                "peak_flops_per_s": self._peak,
            }
        self._run.emit_event("throughput_measured", "debug", payload=JsonObject(payload))


def check_counts(counts: dict[str, Any]) -> dict[str, float]:
    """What a step says that it did.

    Raises:
        SchemaValidationError: No number that is finite and not negative; the message names it.
    """
    return {
        name: _check_amount(amount, name) for name, amount in counts.items() if amount is not None
    }


def find_cuda_name(index: int | None) -> str | None:
    """The name of a CUDA device by the torch that is loaded already; None where there is none."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        return str(cuda.get_device_name(index))
    except Exception:  # noqa: BLE001 - a driver may raise anything
        return None


def _check_amount(value: Any, argument: str) -> float:
    amount = to_float(value, argument, "telemetry")
    if not math.isfinite(amount) or amount < 0:
        raise SchemaValidationError(
            f"{argument} must be a finite number that is not negative, got {amount}"
        )
    return amount
