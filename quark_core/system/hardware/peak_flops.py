"""What a GPU can compute at most, by its name and the precision of its matrix products.

Dense products, without sparsity, with float32 accumulation where that differs, of one device as
the driver shows it. What is not in the table is not known: a wrong peak is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PRECISIONS: tuple[str, ...] = ("fp8", "bf16", "fp16", "tf32", "fp32")
"""Names of precisions, as they are asked for."""

_SPELLINGS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    **{name: name for name in PRECISIONS},
}
_TERA = 1e12


def _list_peaks(
    half: float, tf32: float | None, fp32: float | None, fp8: float | None = None
) -> dict[str, float]:
    """TFLOP/s as FLOP/s; bfloat16 and float16 are equally fast."""
    given = {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32, "fp8": fp8}
    return {name: peak * _TERA for name, peak in given.items() if peak is not None}


# From the vendors' data sheets; where these give figures with sparsity, half of them.
_H100_SXM = _list_peaks(989.4, 494.7, 66.9, 1978.9)  # NVIDIA H100 / H200 Tensor Core GPU Datasheet
_TABLE: tuple[tuple[str, dict[str, float]], ...] = (
    (r"gb200", _list_peaks(2500, 1250, None, 5000)),  # NVIDIA GB200 NVL72 datasheet, by 72
    (r"b200", _list_peaks(2250, 1125, None, 4500)),  # NVIDIA DGX B200 datasheet, by 8
    (r"h100 nvl", _list_peaks(835.5, 417.5, 60, 1670.5)),  # NVIDIA H100 NVL product brief
    (r"h100 pcie", _list_peaks(756, 378, 51, 1513)),  # NVIDIA H100 Tensor Core GPU Datasheet
    (r"gh200|h200|h100|h800", _H100_SXM),
    (r"h20", _list_peaks(148, 74, 44, 296)),  # NVIDIA H20 datasheet
    (r"a100|a800", _list_peaks(312, 156, 19.5)),  # NVIDIA A100 Tensor Core GPU Datasheet
    (r"rtx a6000", _list_peaks(154.8, 77.4, 38.7)),  # NVIDIA RTX A6000 datasheet
    (r"a40", _list_peaks(149.7, 74.8, 37.4)),  # NVIDIA A40 datasheet
    (r"a30", _list_peaks(165, 82, 10.3)),  # NVIDIA A30 datasheet
    (r"a10", _list_peaks(125, 62.5, 31.2)),  # NVIDIA A10 datasheet
    (r"l40s", _list_peaks(362, 183, 91.6, 733)),  # NVIDIA L40S datasheet
    (r"l40", _list_peaks(181, 90.5, 90.5, 362)),  # NVIDIA L40 datasheet
    (r"l4", _list_peaks(121, 60, 30.3, 242.5)),  # NVIDIA L4 datasheet
    (r"rtx 6000 ada", _list_peaks(364.2, 182.1, 91.1, 728.5)),  # NVIDIA RTX 6000 Ada datasheet
    (r"rtx 5090", _list_peaks(209.5, 104.8, 104.8, 419)),  # NVIDIA RTX Blackwell whitepaper
    (r"rtx 4090", _list_peaks(165.2, 82.6, 82.6, 330.3)),  # NVIDIA Ada GPU Architecture whitepaper
    (r"rtx 3090", _list_peaks(71, 35.6, 35.6)),  # NVIDIA Ampere GA102 whitepaper
    # Of Volta and Turing tensor cores take float16 only.
    (r"v100[- ]pcie", {"fp16": 112 * _TERA, "fp32": 14 * _TERA}),  # NVIDIA V100 datasheet
    (r"v100", {"fp16": 125 * _TERA, "fp32": 15.7 * _TERA}),  # NVIDIA V100 datasheet
    (r"t4", {"fp16": 65 * _TERA, "fp32": 8.1 * _TERA}),  # NVIDIA T4 datasheet
    (r"mi300x|mi325x", _list_peaks(1307.4, 653.7, 163.4, 2614.9)),  # AMD Instinct data sheets
    (r"mi250x", _list_peaks(191.5, None, 47.85)),  # AMD Instinct MI250X, one of its two dies
    (r"mi210", _list_peaks(181, None, 45.3)),  # AMD Instinct MI210 data sheet
)
_PATTERNS = tuple(
    (re.compile(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])"), peaks) for pattern, peaks in _TABLE
)


def find_peak_flops(name: str | None, precision: str) -> float | None:
    """FLOP/s of one device at most; None where the name or the precision is not known.

    Args:
        name: As the driver calls it, such as `NVIDIA H100 80GB HBM3`.
        precision: One of `PRECISIONS`.
    """
    lowered = (name or "").lower()
    # Of a slice of a GPU nobody says what share it has.
    if " mig " in f" {lowered} ":
        return None
    for pattern, peaks in _PATTERNS:
        if pattern.search(lowered):
            return peaks.get(precision)
    return None


def read_precision(precision: object) -> str | None:
    """One of `PRECISIONS` for a name or a torch dtype; None where it is none."""
    return _SPELLINGS.get(str(precision).removeprefix("torch.").lower())
