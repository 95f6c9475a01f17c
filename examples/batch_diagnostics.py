"""Which batches are hard, and which classes does training see? Without storing any sample.

    python examples/batch_diagnostics.py [--epochs 4] [--storage-dir DIR]

Trains on handwritten digits of which two batches were given wrong labels on
purpose, and finds them. Needs the extra "torch" and scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from quark import (
    DataDiagnostics,
    DataDiagnosticsConfig,
    MappingBatchMetadataAdapter,
    TrainingSession,
)

BATCH_SIZE = 64
MISLABELLED = (5, 17)


def make_batches() -> list[dict[str, object]]:
    """Batches as a loader gives them: mappings, with the ids of their samples."""
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    batches: list[dict[str, object]] = []
    for number, ids in enumerate(order.split(BATCH_SIZE)):
        targets = labels[ids]
        if number in MISLABELLED:
            targets = (targets + 5) % 10
        batches.append({"inputs": inputs[ids], "labels": targets, "sample_ids": ids})
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description="Find hard batches.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    adapter = MappingBatchMetadataAdapter(sample_id_key="sample_ids", label_key="labels")
    batches = make_batches()
    with (
        TrainingSession.start_run(
            project="data-diagnostics-demo", storage_dir=arguments.storage_dir
        ) as session,
        DataDiagnostics(
            session, config=DataDiagnosticsConfig(batch_size=32, adapter=adapter)
        ) as diagnostics,
    ):
        step = 0
        for epoch in range(arguments.epochs):
            for batch in batches:
                optimizer.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])
                loss.backward()
                optimizer.step()
                diagnostics.log_batch(loss, step=step, epoch=epoch, batch=batch)
                step += 1

        # Of the first epochs every batch is hard, so look at the last one.
        last = arguments.epochs - 1
        summary = diagnostics.summarize(epoch_min=last, hard_batch_limit=3)
        exposure = diagnostics.summarize_exposure()
        hard = diagnostics.find_hard_batches(epoch_min=last, limit=2)
        if summary.loss_summary is not None:
            print("loss:", summary.loss_summary.to_dict())
        print("classes:", dict(exposure.class_counts))
        for finding in hard:
            number = (finding.step or 0) % len(batches)
            print(f"hard: batch {number}, loss {finding.loss:.2f}, {', '.join(finding.reasons)}")
    print(f"mislabelled on purpose: batches {MISLABELLED}")


if __name__ == "__main__":
    main()
