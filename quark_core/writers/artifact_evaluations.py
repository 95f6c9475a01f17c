"""Evaluations of a model as artifacts: confusion matrix, curves of a classifier, histograms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from quark_core.artifacts.media import read_array
from quark_core.errors import SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.records.checks import check_histogram
from quark_core.records.query import spell_out
from quark_core.writers.artifact_links import LinkedArtifacts
from quark_core.writers.artifact_writing import Placement

if TYPE_CHECKING:
    from quark_core.records.columns import Array

_MOST_CLASSES = 1_000
_MOST_CURVES = 100
_MOST_POINTS = 1_000
_MOST_LABEL = 200
_MOST_BINS = 10_000

CURVES = {"pr_curve": ("recall", "precision"), "roc_curve": ("fpr", "tpr")}
"""Type of a curve -> what goes to the right, and what goes up."""

_AREAS = {"pr_curve": "average_precision", "roc_curve": "auc"}


def count_confusions(
    y_true: Any, y_pred: Any, labels: Sequence[Any] | Mapping[Any, Any] | None
) -> dict[str, Any]:
    """How often which class was taken for which: `{"labels": [...], "matrix": [[...]]}`.

    A row for each true class, a column for each predicted one.

    Args:
        y_true, y_pred: Classes of the samples: integers, texts, or anything that says itself.
        labels: The classes in their order; or names by class. By default those that occur,
            in order. Where names are given for classes 0, 1, …, one for each, they are these.

    Raises:
        SchemaValidationError: Not as many of one as of the other, none at all, more than 1000
            classes, or one that `labels` lacks.
    """
    truth, told = _list_classes(y_true, "y_true"), _list_classes(y_pred, "y_pred")
    if len(truth) != len(told):
        raise SchemaValidationError(
            f"y_true has {len(truth)} classes and y_pred {len(told)}: both need one per sample"
        )
    seen = sorted({*truth, *told}, key=_order)
    classes, names = _name_classes(seen, labels)
    if len(classes) > _MOST_CLASSES:
        raise SchemaValidationError(f"{len(classes)} classes; at most {_MOST_CLASSES} are allowed")
    places = {found: place for place, found in enumerate(classes)}
    matrix = [[0] * len(classes) for _ in classes]
    for row, column in zip(truth, told, strict=True):
        if row not in places or column not in places:
            missing = row if row not in places else column
            raise SchemaValidationError(f"labels does not contain the class {missing!r:.60}")
        matrix[places[row]][places[column]] += 1
    return {"labels": names, "matrix": matrix}


def take_confusions(matrix: Any, labels: Sequence[Any] | None) -> dict[str, Any]:
    """A matrix that was counted elsewhere, in the form of `count_confusions`.

    Raises:
        SchemaValidationError: Not square, not numbers, or with another number of labels.
    """
    array = read_array(matrix, "matrix")
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.dtype.kind not in "fiu":
        raise SchemaValidationError(f"matrix must be square and contain numbers, got {array.shape}")
    if len(array) > _MOST_CLASSES:
        raise SchemaValidationError(f"{len(array)} classes; at most {_MOST_CLASSES} are allowed")
    names = [str(place) for place in range(len(array))]
    if labels is not None:
        names = [str(label)[:_MOST_LABEL] for label in labels]
    if len(names) != len(array):
        raise SchemaValidationError(
            f"labels has {len(names)} names, but the matrix has {len(array)} rows"
        )
    return {"labels": names, "matrix": array.tolist()}


def describe_curves(
    kind: str,
    y_true: Any,
    y_score: Any,
    points: Any,
    labels: Sequence[Any] | None,
) -> dict[str, Any]:
    """Curves of precision over recall, or of true over false positives, one for each class.

    Args:
        kind: pr_curve or roc_curve.
        y_true: Classes of the samples: integers from 0 on; or 0 and 1, with one score each.
        y_score: Scores: one for each sample, of the class 1, or `(samples, classes)`.
        points: Instead of these: x and y, as a pair of sequences or by their names
            (`recall`, `precision`; `fpr`, `tpr`); or a mapping of such by class.
        labels: Names of the classes.

    Returns:
        `{"x", "y", "curves": [{"label", "x", "y", "thresholds", "area", "positives"}]}`, with
        the area that scikit-learn tells as average precision, or as AUC.

    Raises:
        SchemaValidationError: Neither or both, or shapes that do not fit.
    """
    if (points is None) is (y_true is None or y_score is None):
        raise SchemaValidationError("pass y_true and y_score, or points")
    right, up = CURVES[kind]
    if points is None:
        curves = _measure_curves(kind, y_true, y_score, labels)
    else:
        named = points if isinstance(points, Mapping) and right not in points else {"": points}
        curves = [_take_points(kind, name, each) for name, each in named.items()]
    return {"x": right, "y": up, "area": _AREAS[kind], "curves": curves[:_MOST_CURVES]}


def measure_histogram(values: Any, bins: object) -> tuple[list[float], list[float], dict[str, Any]]:
    """Edges and counts of a histogram of values, and what was left out of it.

    Args:
        values: An array, a tensor or a sequence of numbers, of any shape.
        bins: How many bins, or their edges.

    Raises:
        SchemaValidationError: No numbers, or no such bins.
    """
    import numpy as np

    array = np.ravel(read_array(values, "values"))
    if array.dtype.kind not in "fiu":
        raise SchemaValidationError(f"values must contain numbers, not {array.dtype}")
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    edges: Any = bins.tolist() if hasattr(bins, "tolist") else bins
    if isinstance(edges, int) and not isinstance(edges, bool) and not 0 < edges <= _MOST_BINS:
        raise SchemaValidationError(f"bins must be from 1 to {_MOST_BINS}, got {edges}")
    try:
        # Halved, so that no difference is larger than a float can be.
        counts, found = np.histogram(
            finite / 2.0, bins=edges if isinstance(edges, int) else np.asarray(edges) / 2.0
        )
    except (TypeError, ValueError) as error:
        raise SchemaValidationError(f"bins: {error}") from error
    notes: dict[str, Any] = {"values": int(array.size)}
    if left_out := int(array.size - finite.size):
        notes["non_finite"] = left_out
    return (found * 2.0).tolist(), counts.tolist(), notes


def _measure_curves(
    kind: str, y_true: Any, y_score: Any, labels: Sequence[Any] | None
) -> list[dict[str, Any]]:
    import numpy as np

    scores = read_array(y_score, "y_score")
    if scores.dtype.kind not in "fiu" or scores.ndim not in (1, 2):
        raise SchemaValidationError(
            f"y_score must be numbers (samples,) or (samples, classes), got {scores.shape}"
        )
    scores = scores.astype(np.float64)
    truth = read_array(y_true, "y_true")
    names = None if labels is None else [str(label)[:_MOST_LABEL] for label in labels]
    if truth.ndim != 1 or len(truth) != len(scores) or not len(truth):
        raise SchemaValidationError(
            f"y_true must contain one class for each of {len(scores)} samples, got {truth.shape}"
        )
    if truth.dtype.kind not in "iuf":
        # Texts: in the order of the labels where they are given, in their own otherwise.
        order = names or [str(found) for found in np.unique(truth)]
        places = {name: place for place, name in enumerate(order)}
        try:
            truth = np.array([places[str(found)] for found in truth.tolist()])
        except KeyError as error:
            raise SchemaValidationError(f"labels does not contain the class {error}") from error
        names = order
    if scores.ndim == 1 or scores.shape[1] == 1:
        label = names[-1] if names else "1"
        return [_measure_curve(kind, label, truth == 1, scores.reshape(-1))]
    return [
        _measure_curve(
            kind,
            names[place] if names and place < len(names) else str(place),
            truth == place,
            scores[:, place],
        )
        for place in range(min(scores.shape[1], _MOST_CURVES))
    ]


def _measure_curve(kind: str, label: str, hits: Array, scores: Array) -> dict[str, Any]:
    """One curve, at every score that occurs, as scikit-learn counts it."""
    import numpy as np

    known = np.isfinite(scores)
    hits, scores = hits[known], scores[known]
    order = np.argsort(-scores, kind="stable")
    hits, scores = hits[order], scores[order]
    ends = np.r_[np.flatnonzero(np.diff(scores)), len(scores) - 1] if len(scores) else []
    ends = np.asarray(ends, dtype=np.int64)
    caught = np.cumsum(hits)[ends].astype(float) if len(ends) else np.zeros(0)
    taken = ends + 1.0
    positives, negatives = float(hits.sum()), float(len(hits) - hits.sum())
    thresholds = scores[ends] if len(ends) else np.zeros(0)
    if kind == "roc_curve":
        x = np.r_[0.0, (taken - caught) / negatives if negatives else np.zeros(len(ends))]
        y = np.r_[0.0, caught / positives if positives else np.zeros(len(ends))]
        area = float(np.trapezoid(y, x)) if positives and negatives else None
    else:
        recall = caught / positives if positives else np.ones(len(ends))
        x, y = np.r_[0.0, recall], np.r_[1.0, caught / taken]
        area = float(np.sum(np.diff(x) * y[1:])) if positives else None
    kept = _thin(len(x))
    return {
        "label": label,
        "x": x[kept].tolist(),
        "y": y[kept].tolist(),
        # Of the first point nobody is taken: no score is as high.
        "thresholds": [None, *thresholds[kept[1:] - 1].tolist()],
        "area": area,
        "positives": int(positives),
        "left_out": int((~known).sum()),
    }


def _take_points(kind: str, name: object, points: Any) -> dict[str, Any]:
    import numpy as np

    pair = [points.get(axis) for axis in CURVES[kind]] if isinstance(points, Mapping) else points
    if isinstance(pair, (str, bytes)) or not hasattr(pair, "__len__") or len(pair) != 2:
        raise SchemaValidationError(
            f"points must be {' and '.join(CURVES[kind])}, as two sequences, got {type(points)}"
        )
    x, y = (read_array(values, "points").astype(np.float64).ravel() for values in pair)
    if len(x) != len(y):
        raise SchemaValidationError(f"points has {len(x)} x values and {len(y)} y values")
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    # Either way around, as scikit-learn tells precision over recall from the right.
    way = 1.0 if len(x) < 2 or x[-1] >= x[0] else -1.0
    if kind == "roc_curve":
        area = float(np.trapezoid(y, x)) * way
    else:
        x, y = (x, y) if way > 0 else (x[::-1], y[::-1])
        area = float(np.sum(np.diff(x) * y[1:]))
    kept = _thin(len(x))
    return {
        "label": str(name)[:_MOST_LABEL],
        "x": x[kept].tolist(),
        "y": y[kept].tolist(),
        "area": area,
        "left_out": int((~known).sum()),
    }


def _thin(count: int) -> Any:
    """Places of at most so many points, evenly, with the first and the last."""
    import numpy as np

    if count <= _MOST_POINTS:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, _MOST_POINTS).round().astype(np.int64))


def _list_classes(values: Any, argument: str) -> list[Any]:
    array = read_array(values, argument)
    if array.ndim != 1:
        raise SchemaValidationError(
            f"{argument} must contain one class for each sample, got {array.shape}. For scores, "
            "pass their argmax"
        )
    classes = array.tolist()
    if not classes:
        raise SchemaValidationError(f"{argument} must not be empty")
    return [
        int(found) if isinstance(found, float) and found.is_integer() else _settle(found)
        for found in classes
    ]


def _settle(found: Any) -> Any:
    return found if isinstance(found, int) else str(found)[:_MOST_LABEL]


def _order(found: Any) -> tuple[bool, Any]:
    return isinstance(found, str), found


def _name_classes(seen: list[Any], labels: Any) -> tuple[list[Any], list[str]]:
    """The classes in their order, and what they are called."""
    if labels is None:
        return seen, [str(found) for found in seen]
    if isinstance(labels, Mapping):
        pairs = [(_settle(key), str(name)[:_MOST_LABEL]) for key, name in labels.items()]
        return [key for key, _ in pairs], [name for _, name in pairs]
    if isinstance(labels, (str, bytes)) or not hasattr(labels, "__iter__"):
        raise SchemaValidationError(
            f"labels must be a list of classes, or names by class, not {type(labels).__name__}"
        )
    given = [_settle(label) for label in labels]
    are_names = all(isinstance(found, int) for found in seen) and not set(seen) <= set(given)
    if are_names and all(0 <= found < len(given) for found in seen):
        return list(range(len(given))), [str(label) for label in given]
    return given, [str(label) for label in given]


_BINS = 64
_HISTOGRAM = "histogram"
_JSON: dict[str, Any] = {"media_type": "application/json"}


class EvaluationArtifacts(LinkedArtifacts):
    """The ways of storing what was measured of a model; see `ArtifactStore`.

    Each call measures, and returns when the payload is on the disk. numpy is all they need;
    the numbers are those of scikit-learn.
    """

    @spell_out(Placement)
    def log_confusion_matrix(
        self,
        name: str,
        y_true: Any = None,
        y_pred: Any = None,
        *,
        matrix: Any = None,
        labels: Sequence[Any] | Mapping[Any, str] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a confusion matrix, from predictions or from counts.

        Args:
            name: Name, or full key.
            y_true, y_pred: True and predicted class of each sample: integers or strings.
            matrix: Counts instead of predictions, with a row per true class.
            labels: Classes in order, their names, or a mapping of class to name.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `confusion_matrix`, JSON `{"labels", "matrix"}`, with `accuracy` in its
            metadata.

        Raises:
            SchemaValidationError: Neither or both inputs are given, their lengths differ, a class
                is not in `labels`, or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_confusion_matrix", "confusion_matrix", name, **place)
        if (matrix is None) is (y_true is None or y_pred is None):
            raise SchemaValidationError("pass y_true and y_pred, or matrix")
        if matrix is None:
            found = count_confusions(y_true, y_pred, labels)
        else:
            names = labels.values() if isinstance(labels, Mapping) else labels
            found = take_confusions(matrix, None if names is None else list(names))
        total = sum(map(sum, found["matrix"]))
        hits = sum(row[at] for at, row in enumerate(found["matrix"]))
        facts = {**_JSON, "classes": len(found["labels"]), "samples": total}
        if total:
            facts["accuracy"] = hits / total
        return self._keep_json(intake, found, facts)

    @spell_out(Placement)
    def log_pr_curve(
        self,
        name: str,
        y_true: Any = None,
        y_score: Any = None,
        *,
        points: Any = None,
        labels: Sequence[Any] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store precision-recall curves, one per class, from scores or from points.

        More than 1000 points of a curve are thinned evenly. Areas are computed from all points.

        Args:
            name: Name, or full key.
            y_true: Class of each sample: integers from 0, or strings with `labels`.
            y_score: Scores of shape `(samples,)` for class 1, or `(samples, classes)`.
            points: Points instead of scores: `(recall, precision)`, a mapping of both, or a mapping
                of class to such.
            labels: Names of the classes.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `pr_curve`, JSON, with `average_precision` per class in its metadata.

        Raises:
            SchemaValidationError: Neither or both inputs are given, or their shapes do not match.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_pr_curve", "pr_curve", name, **place)
        return self._keep_curves(
            intake, describe_curves("pr_curve", y_true, y_score, points, labels)
        )

    @spell_out(Placement)
    def log_roc_curve(
        self,
        name: str,
        y_true: Any = None,
        y_score: Any = None,
        *,
        points: Any = None,
        labels: Sequence[Any] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store ROC curves, one per class, from scores or from points.

        Args:
            name: Name, or full key.
            y_true: Class of each sample: integers from 0, or strings with `labels`.
            y_score: Scores of shape `(samples,)` for class 1, or `(samples, classes)`.
            points: Points instead of scores: `(fpr, tpr)`, a mapping of both, or a mapping of class
                to such.
            labels: Names of the classes.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `roc_curve`, JSON, with `auc` per class in its metadata.

        Raises:
            SchemaValidationError: Neither or both inputs are given, or their shapes do not match.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_roc_curve", "roc_curve", name, **place)
        return self._keep_curves(
            intake, describe_curves("roc_curve", y_true, y_score, points, labels)
        )

    @spell_out(Placement)
    def log_histogram(
        self,
        name: str,
        values: Any = None,
        *,
        bins: Sequence[float] | int = _BINS,
        counts: Sequence[float] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a histogram as `{"bins": [...], "counts": [...]}`, from values or counts.

        Args:
            name: Name, or full key.
            values: Numbers of any shape. Non-finite values are omitted and counted as `non_finite`
                in the metadata.
            bins: For values, the number of bins or their edges. For counts, the edges in ascending
                order, one more than counts.
            counts: Non-negative counts instead of values.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Raises:
            SchemaValidationError: Edges and counts do not match, or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_histogram", _HISTOGRAM, name, **place)
        if (values is None) is (counts is None):
            raise SchemaValidationError("pass values, or bins and counts")
        facts: dict[str, Any] = {}
        if values is not None:
            edges, heights, facts = measure_histogram(values, bins)
        else:
            edges, heights = list_numbers(bins, "bins"), list_numbers(counts, "counts")
        check_histogram(edges, heights, "bins", "counts")
        if not heights:
            raise SchemaValidationError("counts must not be empty")
        return self._keep_json(intake, {"bins": edges, "counts": heights}, facts)

    def _keep_curves(self, intake: Any, found: Mapping[str, Any]) -> ArtifactRecord:
        areas = {curve["label"]: curve["area"] for curve in found["curves"]}
        return self._keep_json(intake, found, {**_JSON, "curves": len(areas), found["area"]: areas})


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
