"""Every piece of evidence of every rule can be drawn: the records that show it are a curve."""

from importlib import import_module

import numpy as np
import pytest
from run_builder import RunBuilder, falling
from test_traced_texts import _collect_builders, _find_modules

from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.engine import analyze_run
from quark.analysis.evidence import place_evidence, read_evidence
from quark_core.records import EvidenceRecord
from quark_core.records.columns import Columns

NO_RECORDS = {"score", "alert", "rules"}


def has_values(curve, piece):
    """What is evidence of something that is finite has finite values to draw."""
    return bool(np.isfinite(curve.value).any()) or piece.record_kind in ("metric", "layer")


class BuilderReader:
    """Reads what a builder has, as a backend that can only be read."""

    def __init__(self, builder):
        self._columns = {
            kind: Columns.from_records(kind, records)
            for kind, records in builder.records.items() if records
        }  # fmt: skip

    def read(self, run_id, kind, query):
        return self._columns.get(kind, Columns.empty(kind)).select(query)

    def load_run(self, run_id):
        raise NotImplementedError

    list_runs = load_run


@pytest.mark.sampled
@pytest.mark.parametrize("module", _find_modules())
def test_the_evidence_of_every_rule_is_a_curve(module, monkeypatch):
    wrong = []
    for builder in _collect_builders(import_module(module), monkeypatch):
        reader = BuilderReader(builder)
        for mode in ("adaptive", "absolute"):
            result = analyze_run(builder.build(), AnalyzerEngineConfig(mode=mode))
            for record in (*result.alerts, *result.health_scores):
                name = getattr(record, "rule_id", record.KIND)
                for piece in record.evidence:
                    if piece.kind in NO_RECORDS:
                        assert piece.record_kind is None
                        continue
                    curve = read_evidence(reader, builder.build().run_id, piece)
                    if curve is None or not len(curve) or not has_values(curve, piece):
                        wrong.append((name, piece, curve))
                        continue
                    start, end = piece.step_start, piece.step_end
                    if start is None or curve.unit == "epoch":
                        continue
                    at = curve.step
                    inside = (at >= start) & (at <= (start if end is None else end))
                    if not inside.any() and not at[0] <= start <= at[-1]:
                        wrong.append((name, piece, (at[0], at[-1])))
    assert wrong == []


def find(builder, rule_id):
    """Where the evidence of a rule's only alert is seen."""
    alerts = [item for item in analyze_run(builder.build()).alerts if item.rule_id == rule_id]
    return [
        (piece.record_kind, piece.record_name, piece.field, piece.summary_type)
        for alert in alerts for piece in alert.evidence
    ]  # fmt: skip


def test_evidence_names_the_records_of_what_was_seen():
    steps = list(range(0, 200, 5))
    norms = np.full(len(steps), 0.1)
    norms[30:] = 1e4
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(3):
        builder.layer(
            f"layers.{index}", summary="gradient", steps=steps, norm=norms if index == 1 else 0.1
        )
        builder.layer(f"layers.{index}", steps=steps, std=1.0, norm=10.0)
    assert ("layer", "layers.1", "norm", "gradient") in find(builder, "exploding_gradients")

    shares = np.full(len(steps), 0.5)
    shares[15:] = 1e-5
    builder = RunBuilder().metric("train/loss", falling())
    for index in range(3):
        builder.layer(
            f"encoder.{index}", steps=steps, std=1.0, mean=0.1, norm=10.0,
            sample_variation_ratio=shares if index == 1 else 0.5,
        )  # fmt: skip
    assert find(builder, "activation_collapse") == [
        ("layer", "encoder.1", "sample_variation_ratio", "activation")
    ]

    spiked = falling()
    spiked[120] = 50.0
    assert find(RunBuilder().metric("train/loss", spiked), "loss_spike") == [
        ("metric", "train/loss", "value", None)
    ]


def test_what_a_rule_says_of_its_evidence_stays():
    builder = RunBuilder().metric("train/loss", falling())
    piece = EvidenceRecord(
        "layer", "fc", "said", record_kind="layer", record_name="fc", field="std",
        summary_type="gradient",
    )  # fmt: skip
    assert place_evidence(piece, builder.build()) == piece
    unknown = EvidenceRecord("layer", "nowhere", "said")
    assert place_evidence(unknown, builder.build()) == unknown
    assert read_evidence(BuilderReader(builder), "run-a", unknown) is None


def test_a_norm_of_what_is_left_of_a_broken_tensor_is_no_value_of_the_curve():
    builder = RunBuilder()
    for step in (0, 5, 10):
        count = int(step == 5)
        builder.parameter(
            "a.weight", steps=[step], gradient_norm=3.0, non_finite_gradient_count=count
        )
        builder.parameter("b.weight", steps=[step], gradient_norm=4.0)
    reader = BuilderReader(builder)
    own = EvidenceRecord(
        "parameter", "a.weight", "said", record_kind="parameter", record_name="a.weight",
        field="gradient_norm",
    )  # fmt: skip
    every = EvidenceRecord(
        "parameters", "gradient_norm", "said", record_kind="parameter", field="gradient_norm"
    )
    for piece, norm in ((own, 3.0), (every, 5.0)):
        curve = read_evidence(reader, "run-a", piece)
        assert curve.step.tolist() == [0, 5, 10]
        np.testing.assert_array_equal(curve.value, [norm, np.nan, norm])


def test_evidence_is_read_within_bounds_and_under_the_names_of_wrappers():
    steps = list(range(0, 50, 5))
    builder = RunBuilder().layer("module.fc", summary="gradient", steps=steps, norm=3.0)
    builder.parameter("a.weight", steps=steps, gradient_norm=3.0)
    builder.parameter("b.weight", steps=steps, gradient_norm=4.0)
    reader = BuilderReader(builder)
    piece = EvidenceRecord(
        "layer", "fc", "said", record_kind="layer", record_name="fc", field="norm",
        summary_type="gradient",
    )  # fmt: skip
    curve = read_evidence(reader, "run-a", piece, low=10, high=30)
    assert (curve.unit, curve.step.tolist()) == ("step", [10, 15, 20, 25, 30])
    every = EvidenceRecord(
        "parameters", "gradient_norm", "said", record_kind="parameter", field="gradient_norm"
    )
    assert read_evidence(reader, "run-a", every).value.tolist() == [5.0] * len(steps)
