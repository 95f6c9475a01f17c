"""What shows how a model does: confusion matrix, curves of a classifier, histograms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quark_core.artifacts.evaluations import (
    count_confusions,
    describe_curves,
    measure_histogram,
    take_confusions,
)
from quark_core.artifacts.payloads import encode_payload
from quark_core.errors import SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.records.checks import check_histogram
from quark_core.writers.artifact_intake import describe_intake
from quark_core.writers.artifact_links import LinkedArtifacts

_BINS = 64
_HISTOGRAM = "histogram"


class EvaluationArtifacts(LinkedArtifacts):
    """The ways of storing what was measured of a model; see `ArtifactStore`.

    Each call measures, and returns when the payload is on the disk. numpy is all they need;
    the numbers are those of scikit-learn.
    """

    def log_confusion_matrix(
        self,
        name: str,
        y_true: Any = None,
        y_pred: Any = None,
        *,
        matrix: Any = None,
        labels: Sequence[Any] | Mapping[Any, str] | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store how often which class was taken for which, out of predictions or as counted.

        Args:
            name: Its name, or its whole key.
            y_true, y_pred: True and predicted class of each sample: integers or texts.
            matrix: Instead of these the counts: a row for each true class.
            labels: The classes in their order, or their names, or names by class.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `confusion_matrix`, json `{"labels", "matrix"}`; `accuracy` in
            its metadata.

        Raises:
            SchemaValidationError: Neither or both, not as many of one as of the other, a class
                that `labels` lacks, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_confusion_matrix",
            "confusion_matrix",
            name,
            namespace,
            step,
            epoch,
            metadata,
            timestamp,
        )
        if (matrix is None) is (y_true is None or y_pred is None):
            raise SchemaValidationError("give y_true and y_pred, or matrix")
        if matrix is None:
            found = count_confusions(y_true, y_pred, labels)
        else:
            names = labels.values() if isinstance(labels, Mapping) else labels
            found = take_confusions(matrix, None if names is None else list(names))
        total = sum(map(sum, found["matrix"]))
        hits = sum(row[place] for place, row in enumerate(found["matrix"]))
        facts = {"classes": len(found["labels"]), "samples": total}
        if total:
            facts["accuracy"] = hits / total
        return self._keep_json(intake, found, facts)

    def log_pr_curve(
        self,
        name: str,
        y_true: Any = None,
        y_score: Any = None,
        *,
        points: Any = None,
        labels: Sequence[Any] | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store precision over recall, one curve for each class, out of scores or of points.

        Args:
            name: Its name, or its whole key.
            y_true: Class of each sample: integers from 0 on, or texts with `labels`.
            y_score: Scores: `(samples,)` of the class 1, or `(samples, classes)`.
            points: Instead of these: `(recall, precision)`, a mapping of the two, or a mapping
                of such by class.
            labels: Names of the classes.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `pr_curve`, json; `average_precision` by class in its metadata.
            Of more than 1000 points evenly some are kept; areas are of all.

        Raises:
            SchemaValidationError: Neither or both, or shapes that do not fit.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_pr_curve", "pr_curve", name, namespace, step, epoch, metadata, timestamp
        )
        return self._keep_curves(
            intake, describe_curves("pr_curve", y_true, y_score, points, labels)
        )

    def log_roc_curve(
        self,
        name: str,
        y_true: Any = None,
        y_score: Any = None,
        *,
        points: Any = None,
        labels: Sequence[Any] | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store the true over the false positives, one curve for each class.

        Args:
            name: Its name, or its whole key.
            y_true, y_score, labels: As in `log_pr_curve`.
            points: Instead of these: `(fpr, tpr)`, a mapping of the two, or one of such by class.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `roc_curve`, json; `auc` by class in its metadata.

        Raises:
            SchemaValidationError: Neither or both, or shapes that do not fit.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_roc_curve", "roc_curve", name, namespace, step, epoch, metadata, timestamp
        )
        return self._keep_curves(
            intake, describe_curves("roc_curve", y_true, y_score, points, labels)
        )

    def log_histogram(
        self,
        name: str,
        values: Any = None,
        *,
        bins: Sequence[float] | int = _BINS,
        counts: Sequence[float] | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a histogram as `{"bins": [...], "counts": [...]}`, of values or as counted.

        Args:
            values: Numbers of any shape, to be counted; what is not finite is left out, and
                `non_finite` in the metadata.
            bins: Of values how many bins, or their edges. Of counts the edges, ascending; one
                more than there are counts. A list, a numpy array or a torch tensor.
            counts: Instead of values: non-negative numbers.
            name, step, epoch, namespace, metadata, timestamp: As in `store`.

        Raises:
            SchemaValidationError: Edges and counts that do not fit, or another
                bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_histogram", _HISTOGRAM, name, namespace, step, epoch, metadata, timestamp
        )
        if (values is None) is (counts is None):
            raise SchemaValidationError("give values, or bins and counts")
        facts: dict[str, Any] = {}
        if values is not None:
            edges, heights, facts = measure_histogram(values, bins)
        else:
            edges, heights = list_numbers(bins, "bins"), list_numbers(counts, "counts")
        check_histogram(edges, heights, "bins", "counts")
        if not heights:
            raise SchemaValidationError("counts must not be empty")
        payload = encode_payload({"bins": edges, "counts": heights}, "json")
        described = describe_intake(intake, facts) if facts else intake
        return self._keep_bytes(described, "json", "json", payload)

    def _keep_json(
        self, intake: Any, value: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> ArtifactRecord:
        facts = {"media_type": "application/json", **facts}
        payload = encode_payload(value, "json")
        return self._keep_bytes(describe_intake(intake, facts), "json", "json", payload)

    def _keep_curves(self, intake: Any, found: Mapping[str, Any]) -> ArtifactRecord:
        areas = {curve["label"]: curve["area"] for curve in found["curves"]}
        return self._keep_json(intake, found, {"curves": len(areas), found["area"]: areas})


def list_numbers(values: Any, argument: str) -> list[Any]:
    """Numbers of a sequence, an array or a tensor, as plain ones.

    Raises:
        SchemaValidationError: Not numbers.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, (str, bytes, Mapping)) or not isinstance(plain, Iterable):
        raise SchemaValidationError(
            f"{argument} must be a sequence of numbers, not {type(values).__name__}"
        )
    numbers = [
        item.item() if hasattr(item, "item") and getattr(item, "ndim", 0) == 0 else item
        for item in plain
    ]
    for index, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise SchemaValidationError(
                f"{argument}[{index}] must be a number, not {type(number).__name__}"
            )
    # JSON holds integers of 64 bits as numbers, and larger ones as texts.
    return [number if abs(number) < 2**63 else _widen(number) for number in numbers]


def _widen(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")
