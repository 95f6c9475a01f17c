"""The metric that a run is judged by, and which way a metric is better.

It stands in the run's configuration, as two plain texts: so every backend that
gives a configuration back gives the objective back too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import msgspec

from quark_core.config import settings
from quark_core.config.arguments import check_label
from quark_core.errors import SchemaValidationError
from quark_core.records import ConfigSnapshot
from quark_core.records.checks import check_choice
from quark_core.records.json_object import JsonObject
from quark_core.records.names import decode_name, encode_name

ObjectiveMode = Literal["min", "max"]
"""Whether an objective is minimized or maximized."""

OBJECTIVE_KEY = "quark_objective"
"""The key of a configuration that names the metric of the objective."""
MODE_KEY = "quark_objective_mode"
"""The key of a configuration that says whether the objective is minimized or maximized."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric that somebody has named.

    Attributes:
        metric: Its name, as it is logged.
        mode: Whether it is better when lower or higher; None where the name must say.
    """

    metric: str
    mode: ObjectiveMode | None = None


def check_objective(metric: object, mode: object = None) -> Objective | None:
    """The objective that two arguments name, or None where they name none.

    Raises:
        SchemaValidationError: One of them is bad, or there is only `mode`.
    """
    if isinstance(mode, str) and mode in ("online", "offline", "disabled", "dryrun"):
        raise SchemaValidationError(
            f"mode must be 'min' or 'max', got {mode!r:.60}. It is the direction of objective=. "
            "Quark always stores runs locally first"
        )
    if mode is not None:
        check_choice(mode, "mode", get_args(ObjectiveMode))
    if metric is None:
        if mode is not None:
            raise SchemaValidationError(
                f"mode={mode!r} needs objective=, the name of the metric to optimize"
            )
        return None
    name = check_label(metric, "objective")
    return Objective(name, mode)  # type: ignore[arg-type]


def parse_objective(text: str, argument: str) -> Objective:
    """The objective in a text such as `val/loss` or `val/score:max`.

    Raises:
        SchemaValidationError: It names no metric; the message begins with `argument`.
    """
    name, _, mode = text.rpartition(":")
    if mode not in get_args(ObjectiveMode):
        name, mode = text, ""
    try:
        found = check_objective(name.strip(), mode or None)
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{argument}: {error}") from None
    assert found is not None
    return found


def choose_objective(metric: object, mode: object) -> Objective | None:
    """Read the objective from arguments or, without them, from QUARK_OBJECTIVE; None without both.

    Raises:
        SchemaValidationError: A bad one.
    """
    given = settings.objective()
    if metric is None and mode is None and given:
        return parse_objective(given, settings.OBJECTIVE)
    return check_objective(metric, mode)


def keep_objective(snapshot: ConfigSnapshot, objective: Objective | None) -> ConfigSnapshot:
    """Return the configuration with the objective written into it."""
    if objective is None:
        return snapshot
    values = {**snapshot.values, OBJECTIVE_KEY: objective.metric}
    values.pop(MODE_KEY, None)
    if objective.mode is not None:
        values[MODE_KEY] = objective.mode
    return msgspec.structs.replace(snapshot, values=JsonObject(values))


def read_objective(values: Mapping[str, Any] | None) -> Objective | None:
    """The objective that a configuration names, or None; whatever else stands there names none."""
    metric, mode = (values or {}).get(OBJECTIVE_KEY), (values or {}).get(MODE_KEY)
    if not isinstance(metric, str) or not metric:
        return None
    return Objective(metric, mode if mode in get_args(ObjectiveMode) else None)


# Which way a metric is better, from its name: the one table of words, for every answer.
#
# A mode that somebody has declared (`start_run(objective=, mode=)`, an argument, a setting) goes
# before the name; `find_mode` puts both together. The words stand here alone: what plays which
# part in an analysis (`metric_roles`) is read from the same ones.

MetricDirection = Literal["higher", "lower", "none"]
"""The direction in which a metric gets better."""

LOSSES = frozenset("loss losses cost costs objective criterion".split())
"""Say that a metric is a loss, not which one."""

_GROUP = frozenset({("loss",), ("losses",)})  # before the name of one of several

# Says by itself that it is a loss, and which one.
NAMED_LOSSES = frozenset(
    """
    nll ce bce xent xe crossentropy logloss mse mae rmse msle rmsle mape huber hinge smoothl1
    infonce nce ntxent ppl perplexity bpc bpb bpd
    """.split()
)
"""Names of losses that do not contain the word."""
ACCURACIES = frozenset("acc accuracy accuracies top1 f1".split())
"""Names of metrics that are accuracies: between 0 and 1, higher is better."""
SCORES = frozenset(
    """
    reward rewards rew return returns score scores elbo bleu sacrebleu chrf rouge rougel rougelsum
    meteor cider spice comet bertscore auc auroc auprc aucpr aupr aupro rocauc roc ap map map50 mar
    iou miou giou psnr ssim msssim snr sdr sisdr sisnr pesq stoi mos vmaf dcg ndcg mrr r2 rsquared
    em exact kappa mcc corrcoef correlation pearson pearsonr spearman spearmanr kendall nmi ami ari
    silhouette f2 fbeta fscore fmeasure precision recall sensitivity specificity tpr tnr ppv npv
    dice jaccard lddt gdt elo rating fitness utility winrate wins hits success successes
    """.split()
)
"""Better when higher, and a result: a run that raises one has learned."""

REWARDS = frozenset(
    """
    reward rewards rew return returns score scores elbo elo rating fitness utility winrate wins
    success successes
    """.split()
)
"""Of the scores those that are no measure of how well labels are said."""

_ERRORS = frozenset(
    """
    error errors err wer cer ter eer per fer der fpr fnr fdr smape wmape wape mase mdape nrmse rmsd
    mrae crps pinball brier ece mce ace regret fid sfid fvd fad kid mmd lpips dists niqe brisque mcd
    chamfer hausdorff emd levenshtein vlb bpp gap penalty
    """.split()
)
_FAILURES = frozenset(
    """
    failure failures failed miss misses missed skipped dropped overflow overflows violation
    violations collision collisions crash crashes timeouts nan nans inf infs l1 l2
    """.split()
)
_COSTS = frozenset(
    "latency time runtime duration delay ttft tpot memory mem stall stalls overhead".split()
)
_UNITS = frozenset(
    """
    ms us ns s sec secs second seconds min mins minute minutes hour hours h bytes kb mb gb tb kib
    mib gib tib
    """.split()
)
_TIMES = frozenset("ms us s sec secs second seconds min minute minutes hour hours h day".split())
_SPEEDS = frozenset("throughput goodput bandwidth fps qps tps mfu tflops speedup speed".split())
# How many of them a second is a speed.
_COUNTED = frozenset(
    """
    tokens tok samples images imgs frames steps iterations iters its it batches examples sequences
    seqs requests queries words episodes updates epochs rows items
    """.split()
)
_LOWER = LOSSES | NAMED_LOSSES | _ERRORS | _FAILURES | _COSTS
_LIKELIHOODS = frozenset("likelihood loglikelihood logprob logp".split())
_HIGHER = (ACCURACIES | SCORES | _SPEEDS | _LIKELIHOODS) - {"top1"}

_RATES = frozenset(
    """
    accuracy acc top1 top5 f1 fbeta auc auroc auprc ap map precision recall sensitivity specificity
    iou miou dice jaccard ssim rate winrate error err
    """.split()
)
_GOOD_RATES = frozenset(
    """
    win winning success pass solve solved hit acceptance accept detection completion click through
    conversion
    """.split()
)
_BAD_RATES = frozenset(
    "fail drop reject rejection alarm collision crash loss discovery lose losing".split()
)
_PAIRS: dict[tuple[str, str], ObjectiveMode] = {
    ("cross", "entropy"): "min",
    ("log", "prob"): "max",
    ("explained", "variance"): "max",
    ("explained", "var"): "max",
    ("edit", "distance"): "min",
    ("inception", "distance"): "min",
    ("frechet", "distance"): "min",
    ("chamfer", "distance"): "min",
    ("hausdorff", "distance"): "min",
    ("true", "positives"): "max",
    ("true", "negatives"): "max",
    ("false", "positives"): "min",
    ("false", "negatives"): "min",
    ("exact", "match"): "max",
}
_TRUTHS: dict[str, ObjectiveMode] = {"true": "max", "false": "min"}
_TOP = re.compile(r"top(\d+|k)?")
_PERCENTILE = re.compile(r"p\d+|q\d+")
# Words that say over what a figure is taken, not what it is.
_QUALIFIERS = frozenset(
    """
    ema sma avg average averaged mean median smooth smoothed epoch step steps batch iter iteration
    macro micro weighted total sum overall all global max min best final last current running
    val valid validation train training test testing eval evaluation dev heldout holdout fold
    metric metrics logs scalars history model net d g at k l lsum n w db pct percent percentage
    """.split()
)
_NEGATIVE = frozenset("neg negative minus".split())
# Say of a known figure that it is one: `brier_score`, `loss_value`, `dice_coefficient`.
_FIGURE = frozenset("score scores return returns value values metric measure".split())
_COEFFICIENT = frozenset("coefficient coef index".split())
_NUMBER = frozenset("count counts number num".split())
ANOTHER_FIGURE = frozenset(
    """
    best min max lowest highest scale scaler weight weights coef coefficient lambda ratio time ms
    seconds std var variance diff delta gap change slope lr patience count norm grad improvement
    """.split()
)
"""Beside a word for a loss they make a figure of its own, or one that only ever gets better."""

_ACRONYMS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (("m?IoU", "_iou"), ("mAP", "_map"), ("chrF", "_chrf"), ("CIDEr", "cider"))
)
_WORDS = re.compile(r"[A-Z]?[a-z]+(?:\d+)?|[A-Z]+(?![a-z])\d*|\d+")
_JOINED = re.compile(
    r"(train|training|val|valid|validation|test|eval|dev)(loss|nll|mse|mae|ppl|acc|accuracy)"
)
_SHORT = 3  # letters: shorter words with a digit are words of their own (`l1`, `p9`)
_OPPOSITE: dict[ObjectiveMode, ObjectiveMode] = {"min": "max", "max": "min"}
_DIRECTIONS: dict[ObjectiveMode | None, MetricDirection] = {
    "min": "lower", "max": "higher", None: "none",
}  # fmt: skip


def find_mode(key: str, objective: Objective | None = None) -> ObjectiveMode | None:
    """Whether a metric is better when lower ("min") or higher ("max"); None where nothing says.

    Args:
        key: The metric, as it was logged or as it is stored.
        objective: What a run was started with, or a caller has named. Where it is of this metric
            its mode counts before the name; without a mode and with a name that says nothing,
            it is "min", as `start_run` documents.
    """
    if objective is not None:
        named = {objective.metric, encode_name(objective.metric)}
        if not named.isdisjoint((key, encode_name(key))):
            return objective.mode or infer_mode(key) or "min"
    return infer_mode(key)


def infer_direction(key: str) -> MetricDirection:
    """`infer_mode` in the words of a comparison."""
    return name_direction(infer_mode(key))


def name_direction(mode: ObjectiveMode | None) -> MetricDirection:
    """A mode in the words of a comparison."""
    return _DIRECTIONS[mode]


@lru_cache(maxsize=65_536)
def infer_mode(key: str) -> ObjectiveMode | None:
    """Whether less ("min") or more ("max") of a metric is better, by its name alone.

    The last word that says what the figure is decides: a `score_loss` is a loss, a `loss_reward`
    a reward. What stands in a folder of losses (`losses/dice`) is a loss. None where the name
    does not say, as of `lr`, `entropy` or `loss_std`.
    """
    parts = [split_name(part) for part in decode_name(key).split("/")]
    parts = [words for words in parts if words]
    while parts:
        words = parts.pop()
        before = parts[-1] if parts else ()
        speed = _read_speed(before, words)
        if speed is not None:
            return speed
        if all(word in _QUALIFIERS or word.isdigit() for word in words):
            continue
        found = _read(words)
        is_in_losses = any(_strip(part) in _GROUP for part in parts)
        if is_in_losses and not ACCURACIES.intersection(words):
            return None if ANOTHER_FIGURE.intersection(words) else "min"
        return found
    return None


def is_rate_name(key: str) -> bool:
    """Whether a metric of this name, with values between 0 and 1, is a share of something."""
    return any(word in _RATES for word in split_name(key.rsplit("/", 1)[-1]))


@lru_cache(maxsize=65_536)
def split_name(key: str) -> tuple[str, ...]:
    """The words of a name in small letters: `val_nll`, `trainLossEpoch`, `Loss/train`."""
    words: list[str] = []
    text = decode_name(key)
    for pattern, plain in _ACRONYMS:
        text = pattern.sub(plain, text)
    for found in _WORDS.findall(text):
        word = found.lower()
        joined = _JOINED.fullmatch(word)
        words += joined.groups() if joined else (word,)
    return tuple(words)


def _read_speed(before: Sequence[str], words: Sequence[str]) -> ObjectiveMode | None:
    """Of `tokens/s` and `s/step`, whose slash parts no folder from a name."""
    if len(words) != 1 or not before:
        return None
    if words[0] in _TIMES and before[-1] in _COUNTED:
        return "max"
    is_one = words[0] in _COUNTED or words[0] in ("step", "iter", "iteration", "batch", "token")
    return "min" if is_one and before[-1] in _UNITS else None


def _read(words: tuple[str, ...]) -> ObjectiveMode | None:
    """What the words of one part of a name say."""
    rest = _strip(words)
    if len(rest) > 1 and rest[0] in _NEGATIVE:
        found = _read(rest[1:])
        # `neg_loss` is the loss of negative samples; `neg_log_loss` and `neg_mse` are turned round.
        is_loss = rest[-1] in LOSSES and "log" not in rest
        return found if found is None or is_loss else _OPPOSITE[found]
    if "per" in words[1:-1]:
        return _read_per(words, words.index("per", 1))
    left = list(rest)
    had_unit = had_top = False
    while left:
        last, before = left[-1], left[-2] if len(left) > 1 else ""
        if last in _TIMES and before in _COUNTED:
            return "max"
        if _TOP.fullmatch(last):
            had_top = True
        elif last in _UNITS and last not in _QUALIFIERS:
            had_unit = True
        elif not (last in _QUALIFIERS or last.isdigit() or _PERCENTILE.fullmatch(last)):
            break
        left.pop()
        if left == ["pass"]:
            return "max"  # `pass@1`
    found = _read_head(left) if left else None
    if found is not None:
        return found
    if had_unit:
        return "min"
    if had_top and not left:
        return "max"
    if left and (left[0],) in _GROUP and ANOTHER_FIGURE.isdisjoint(left):
        return "min"  # `loss_bbox`, one of several losses
    return None


def _read_head(words: list[str]) -> ObjectiveMode | None:
    """What the last word says, with the one before it where it needs that."""
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "rate" and before in ("positive", "negative"):
        return _TRUTHS.get(words[-3]) if len(words) > 2 else None
    if (before, last) in _PAIRS:
        return _PAIRS[before, last]
    if last in ("rate", "rates", "ratio"):
        if before in _BAD_RATES:
            return None if (before, last) == ("loss", "ratio") else "min"
        if before in _GOOD_RATES:
            return "max"
        return _look_up(before) if last != "ratio" or before in _ERRORS else None
    if last in _FIGURE and (known := _look_up(before)) is not None:
        return known
    if last in _COEFFICIENT and before in SCORES:
        return "max"
    if last in _NUMBER and before in _ERRORS | _FAILURES:
        return "min"
    return _look_up(last)


def _strip(words: tuple[str, ...]) -> tuple[str, ...]:
    """Without the first words, as far as they say over what a figure is taken."""
    first = next((place for place, word in enumerate(words) if word not in _QUALIFIERS), 0)
    return words[first:]


def _read_per(words: tuple[str, ...], place: int) -> ObjectiveMode | None:
    """Of `tokens_per_second`, `ms_per_step`, `loss_per_token`."""
    what, unit = words[:place], words[place + 1]
    if what[-1] in ("bits", "nats"):
        return "min"
    known = _read(what)
    if unit in _TIMES:
        return known or "max"
    return known


def _look_up(word: str) -> ObjectiveMode | None:
    if word in _LOWER:
        return "min"
    if word in _HIGHER:
        return "max"
    bare = word.rstrip("0123456789")
    if bare == word or (len(bare) < _SHORT and bare != "ap"):
        return None
    return _look_up(bare)
