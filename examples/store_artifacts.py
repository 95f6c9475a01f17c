"""Store what is no scalar: histograms, checkpoint metadata, tables, images and files.

    python examples/store_artifacts.py [--storage-dir DIR]

Needs nothing but Quark; the image needs the extra "media" and is left out
without it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from quark import ArtifactRecord, ArtifactStore, TrainingSession


def report(_store: ArtifactStore, record: ArtifactRecord) -> None:
    """A retention hook: called after each artifact was stored."""
    print(f"  stored {record.artifact_key} ({record.artifact_type}, {record.size_bytes} bytes)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Store and load artifacts.")
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    activations = np.random.default_rng(0).normal(size=10_000)
    with (
        TrainingSession.start_run(
            project="artifact-demo", storage_dir=arguments.storage_dir
        ) as session,
        ArtifactStore(session, retention_hooks=(report,)) as artifacts,
    ):
        counts, edges = np.histogram(activations, bins=20)
        histogram = artifacts.log_histogram(
            "activation",
            bins=edges,
            counts=counts,
            step=120,
            namespace="layers/encoder",
            metadata={"module": "encoder.0"},
        )
        snapshot = artifacts.log_snapshot(
            "warmup",
            {"checkpoint_path": "checkpoints/step-120.pt", "best_loss": 0.31},
            snapshot_type="checkpoint_metadata",
            step=120,
        )
        artifacts.log_table(
            "confusion", [[48, 2], [3, 47]], columns=["predicted cat", "predicted dog"], step=120
        )
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder, "weights.npy")
            np.save(weights, activations)
            checkpoint = artifacts.log_file(weights, artifact_type="checkpoint", step=120)
        try:
            artifacts.log_image("filters", np.random.default_rng(1).random((16, 16, 3)), step=120)
        except ImportError as error:
            print(f"  no image: {error}")
        # The same payload again costs no room: payloads are kept by their content.
        again = artifacts.store("tensor_summary", "encoder/first", {"mean": 0.02, "std": 0.31})
        twice = artifacts.store("tensor_summary", "encoder/second", {"mean": 0.02, "std": 0.31})
        assert again.sha256 == twice.sha256

        print("loaded:", artifacts.load(snapshot))
        print("bins:", len(artifacts.load(histogram.id)["bins"]))
        with artifacts.open(checkpoint) as stream:
            print("checkpoint:", np.load(stream).shape)
        found = artifacts.read(namespace="layers/encoder", step_min=100)
        print("found:", [record.artifact_name for record in found])
        print("the file lies in", Path(session.run_path, str(histogram.payload_relative_path)))
    print(f"list them with: quark artifacts {session.run_id}")


if __name__ == "__main__":
    main()
