"""Say what goes wrong in a training, since when and where, and compare it with one that goes well.

    python examples/analyzer_diagnostics.py [--storage-dir DIR]

Trains twice on handwritten digits, once with a learning rate that rises far too
high, analyzes both runs and compares them. Needs the extra "torch" and scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import quark

STEPS = 300


def train(session: quark.TrainingSession, *, highest_rate: float) -> None:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with (
        quark.MetricsLogger(session) as metrics,
        quark.watch(session, model, optimizer, every_n_steps=5, telemetry=False) as watch,
    ):
        for step in range(STEPS):
            watch.step(step)
            rate = 0.05 if step < STEPS // 2 else highest_rate
            optimizer.param_groups[0]["lr"] = rate
            chosen = torch.randint(0, 1400, (32,))
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics.log_many({"train/loss": loss.item(), "optimizer/lr": rate}, step=step)
            if step % 10 == 9:
                with torch.no_grad():
                    scores = model(images[1400:])
                    held = functional.cross_entropy(scores, labels[1400:])
                metrics.log("val/loss", held.item(), step=step)


def show_analysis(session: quark.TrainingSession) -> None:
    analyzer = quark.AnalyzerEngine(session)
    result = analyzer.analyze()
    for score in result.health_scores:
        print(f"  {score.score_key:15} {score.score:5.1f} {score.status:9} {score.summary}")
    for alert in result.alerts:
        print(f"  {alert.severity:8} {alert.rule_id} at {alert.culprit}, step {alert.step}")
        print(f"           {alert.fact}")
        print(f"           {alert.inference} {alert.suggested_check}")
    print(f"  {analyzer.explain('overfitting_onset')}")
    phases = quark.PhaseAnalyzer(session).analyze().phases
    print("  phases:", ", ".join(f"{p.phase_name} {p.step_start}-{p.step_end}" for p in phases))


def main() -> None:
    parser = argparse.ArgumentParser(description="Analyze and compare two trainings.")
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sessions = []
    for name, rate in (("steady", 0.05), ("too-fast", 20.0)):
        torch.manual_seed(0)
        session = quark.TrainingSession.start_run(
            project="diagnostics",
            name=name,
            config={"highest_rate": rate},
            storage_dir=arguments.storage_dir,
        )
        with session:
            train(session, highest_rate=rate)
        print(f"{name} ({session.run_id})")
        show_analysis(session)
        sessions.append(session)
    steady, fast = sessions
    target = quark.MetricTargetSpec("val/loss", 0.5, "at_most")
    comparison = quark.ComparisonEngine(
        fast, config=quark.ComparisonEngineConfig(metric_targets=(target,))
    ).compare_to_baseline(steady)
    print("too-fast against steady")
    for change in comparison.changes:
        print(f"  {change.section} {change.path}: {change.reference} -> {change.primary}")
    for diff in comparison.metric_diffs:
        if not diff.metric_key.startswith("system/"):
            lasts = (diff.last.reference, diff.last.primary)
            said = " -> ".join("none" if last is None else f"{last:.3g}" for last in lasts)
            print(f"  {diff.metric_key}: {said}, {diff.reason}")


if __name__ == "__main__":
    main()
