"""Which metric plays which part: conventional keys first, then names that say it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from quark_core.analysis.curves import Curve

__all__ = [
    "TRAIN_ACCURACY_KEYS",
    "TRAIN_LOSS_KEYS",
    "VALIDATION_ACCURACY_KEYS",
    "VALIDATION_LOSS_KEYS",
    "find_curve",
    "find_gradient_norm",
    "find_learning_rate",
    "find_train_accuracy",
    "find_train_loss",
    "find_validation_accuracy",
    "find_validation_loss",
    "is_player_loss",
]

TRAIN_LOSS_KEYS = ("train/loss", "training/loss")
VALIDATION_LOSS_KEYS = ("val/loss", "validation/loss")
TRAIN_ACCURACY_KEYS = ("train/accuracy", "training/accuracy", "train/acc")
VALIDATION_ACCURACY_KEYS = ("val/accuracy", "validation/accuracy", "val/acc")

_HELD_OUT = re.compile(
    r"(^|[/_.-])(val|valid|validation|eval|evaluation|test|dev|heldout)([/_.-]|$)"
)
_LOSS = re.compile(r"(^|[/_.-])(loss|nll|cost|objective|perplexity_loss)$")
_ACCURACY = re.compile(r"(^|[/_.-])(acc|accuracy|top1|f1)$")
_GRADIENT_NORM = re.compile(
    r"(^|[/_.-])(grad|gradient|gradients)([/_.-]?(global|total))?[/_.-]?norm$"
)
_PLAYER = re.compile(r"disc|critic|judge|adversar|(^|[/_.-])[dg]_loss|fake|real_loss")
_RATE = re.compile(r"(^|[/_.-])(lr|learning_rate|learning-rate)([/_.-]?\d+)?$")

Metrics = Mapping[str, Curve]


def is_player_loss(key: str) -> bool:
    """Whether a loss is that of one of two players, whose level says little."""
    return _PLAYER.search(key.lower()) is not None


def find_curve(metrics: Metrics, keys: Iterable[str]) -> Curve | None:
    """The first of these keys that the run has points of."""
    for key in keys:
        if key in metrics and len(metrics[key]):
            return metrics[key]
    return None


def find_train_loss(metrics: Metrics, keys: Iterable[str] = TRAIN_LOSS_KEYS) -> Curve | None:
    """The training loss: one of the keys, or else a metric that is called so."""
    return find_curve(metrics, keys) or _find(metrics, _LOSS, held_out=False)


def find_validation_loss(
    metrics: Metrics, keys: Iterable[str] = VALIDATION_LOSS_KEYS
) -> Curve | None:
    """The validation loss; likewise."""
    return find_curve(metrics, keys) or _find(metrics, _LOSS, held_out=True)


def find_train_accuracy(
    metrics: Metrics, keys: Iterable[str] = TRAIN_ACCURACY_KEYS
) -> Curve | None:
    """The training accuracy; likewise."""
    return find_curve(metrics, keys) or _find(metrics, _ACCURACY, held_out=False)


def find_validation_accuracy(
    metrics: Metrics, keys: Iterable[str] = VALIDATION_ACCURACY_KEYS
) -> Curve | None:
    """The validation accuracy; likewise."""
    return find_curve(metrics, keys) or _find(metrics, _ACCURACY, held_out=True)


def find_gradient_norm(metrics: Metrics) -> Curve | None:
    """The norm of all gradients together, where the run logs it."""
    return _find(metrics, _GRADIENT_NORM, held_out=False)


def find_learning_rate(metrics: Metrics) -> Curve | None:
    """The learning rate, where the run logs it."""
    return _find(metrics, _RATE, held_out=False)


def _find(metrics: Metrics, pattern: re.Pattern[str], *, held_out: bool) -> Curve | None:
    """The fitting metric with the most points; of equals the shortest name."""
    fits = [
        key
        for key, curve in metrics.items()
        if len(curve)
        and not key.startswith("system/")
        and pattern.search(key.lower())
        and bool(_HELD_OUT.search(key.lower())) is held_out
    ]
    best = min(fits, key=lambda key: (-len(metrics[key]), len(key), key), default=None)
    return None if best is None else metrics[best]
