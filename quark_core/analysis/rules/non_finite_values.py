"""NaN and infinity, in metrics, activations, gradients or weights."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.observations import observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory, AlertSeverity

__all__ = ["NonFiniteValues"]


class NonFiniteValues:
    """Fires where a loss, a weight or an activation is NaN or infinite.

    Gradients alone are not enough: with a scaled loss an overflow now and then
    is how the scale is found. Infinities that a layer has from its first probe
    on, as a mask makes them, do not count while the loss is finite.
    """

    rule_id = "non_finite_values"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        run = case.run
        seen: list[tuple[int, int, str, str, int]] = []  # step, rank of the source, kind, name, n
        losses = {curve.key for curve in (case.train_loss, case.validation_loss) if curve}
        curves = dict(run.metrics)
        if case.train_loss is not None:
            curves.setdefault(case.train_loss.key, case.train_loss)
        for key, curve in curves.items():
            bad = np.flatnonzero(~np.isfinite(curve.value))
            if len(bad) and (key in losses or len(bad) >= 2) and "grad" not in key.lower():
                seen.append((int(curve.step[bad[0]]), 3, "metric", key, len(bad)))
        stuck = case.outcome.non_finite_step is not None
        for history in run.activations.values():
            nan = np.nan_to_num(history["nan_count"])
            bad_rows = np.flatnonzero(nan + np.nan_to_num(history["inf_count"]))
            if not len(bad_rows):
                continue
            if not nan.any() and bad_rows[0] == 0 and not stuck:
                continue
            seen.append((int(history.step[bad_rows[0]]), 1, "layer", history.name, len(bad_rows)))
        for parameter in run.parameters.values():
            bad_rows = np.flatnonzero(np.nan_to_num(parameter["non_finite_value_count"]))
            if len(bad_rows):
                seen.append(
                    (int(parameter.step[bad_rows[0]]), 2, "parameter", parameter.name,
                     len(bad_rows))
                )  # fmt: skip
        gradients = self._gradients(case)
        if not seen and not gradients:
            if not curves and not run.activations and not run.parameters:
                return Verdict(reason="the run has no figures", missing=("metrics", "layers"))
            return Verdict(reason="every value is finite", observed=0.0, threshold=1.0)
        seen += gradients
        return Verdict(findings=(self._describe(seen, stuck),))

    @staticmethod
    def _gradients(case: Case) -> list[tuple[int, int, str, str, int]]:
        """Gradients that end non-finite, in several probes in a row."""
        out = []
        for history in case.run.gradients.values():
            nan, inf = np.nan_to_num(history["nan_count"]), np.nan_to_num(history["inf_count"])
            bad = (nan + inf) > 0
            rows = np.flatnonzero(bad)
            if len(rows) >= 2 and bool(bad[-2:].all()):
                out.append((int(history.step[rows[0]]), 4, "gradient", history.name, len(rows)))
        return out

    @staticmethod
    def _describe(seen: list[tuple[int, int, str, str, int]], stuck: bool) -> Finding:
        # The earliest step, and there the place nearest to the cause: layers come in their order.
        step, _, kind, name, _ = min(seen, key=lambda item: item[:2])
        severity: AlertSeverity = "critical" if stuck else "error"
        if not stuck and all(item[2] == "metric" and item[4] == 1 for item in seen):
            severity = "warning"
        others = tuple(dict.fromkeys(item[3] for item in seen if item[3] != name))
        words = {"metric": "the metric", "layer": "the output of", "parameter": "the parameter",
                 "gradient": "the gradient of"}[kind]  # fmt: skip
        return Finding(
            culprit=name,
            severity=severity,
            title="Values are not finite",
            fact=f"From step {step} on, {words} {name} has NaN or infinite values"
            + (f", and {len(others)} other figures have." if others else "."),
            inference="Everything that is computed from it is not finite either."
            if kind != "metric"
            else "The loss or a figure of it left the range of its number format, or divides by "
            "zero.",
            suggested_check="Look at the batch and the operation at that step: log or division of "
            "zero, an empty mask, overflow of half precision; torch.autograd.set_detect_anomaly "
            "names the operation.",
            evidence=tuple(
                observe(item[2], item[3], f"not finite at {item[4]} probes or points",
                        float(item[4]), 0.0, item[0])
                for item in sorted(seen, key=lambda item: item[:2])[:6]
            ),
            step=step,
            affected=others[:20],
        )  # fmt: skip
