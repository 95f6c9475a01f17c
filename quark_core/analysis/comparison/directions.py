"""Which way a metric is better, from its name."""

from __future__ import annotations

import re

from quark_core.analysis.comparison.config import MetricDirection
from quark_core.records.names import decode_name

__all__ = ["infer_direction", "is_rate_name"]

_LOWER = frozenset(
    """
    loss losses nll cost objective error errors err perplexity ppl bpb bpc mse mae rmse mape smape
    wer cer ter fid kid lpips regret brier ece latency time duration ms us ns sec secs second
    seconds minutes hours bytes kb mb gb mib gib overflow overflows misses skipped crossentropy
    logloss hinge
    """.split()
)
_HIGHER = frozenset(
    """
    accuracy acc top1 top5 f1 f2 fbeta auc auroc auprc ap map map50 ndcg mrr precision recall
    sensitivity specificity reward rewards return returns score scores bleu rouge rougel meteor
    cider iou miou dice jaccard r2 psnr ssim mcc kappa elo winrate throughput hits exact em
    """.split()
)
_RATES = frozenset(
    """
    accuracy acc top1 top5 f1 fbeta auc auroc auprc ap map precision recall sensitivity specificity
    iou miou dice jaccard ssim rate winrate error err
    """.split()
)
_GOOD_RATES = frozenset("win success pass solve hit acceptance detection".split())
_BAD_RATES = frozenset("error failure fail miss drop word character rejection".split())
# Words that say over what a figure is taken, not what it is.
_QUALIFIERS = frozenset(
    """
    ema avg average mean median smooth smoothed epoch step batch macro micro weighted total sum
    val valid validation train training test eval evaluation dev top max min best final running
    """.split()
)


def infer_direction(key: str) -> MetricDirection:
    """Higher or lower is better, or none where the name of the metric does not say."""
    words = _split(key)
    parent = key.rpartition("/")[0]
    if parent and all(word in _QUALIFIERS for word in words):
        return infer_direction(parent)
    if len(words) >= 2 and "per" in words[:-1]:
        unit = words[len(words) - 1 - words[::-1].index("per") + 1]
        return "higher" if unit in ("second", "sec", "s", "minute", "hour", "day") else "none"
    while len(words) > 1 and (words[-1] in _QUALIFIERS or words[-1].isdigit()):
        words.pop()
    if not words:
        return "none"
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "rate":
        if before in _BAD_RATES:
            return "lower"
        return "higher" if before in _GOOD_RATES else "none"
    if last in ("score", "scores", "return") and before in _LOWER:
        return "lower"
    if last in _LOWER:
        return "lower"
    return "higher" if last in _HIGHER else "none"


def is_rate_name(key: str) -> bool:
    """Whether a metric of this name, with values between 0 and 1, is a share of something."""
    return any(word in _RATES for word in _split(key))


def _split(key: str) -> list[str]:
    name = decode_name(key).rsplit("/", 1)[-1]
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
