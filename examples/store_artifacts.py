"""Store what is no scalar: histograms, tables, images, sound, curves, files, directories; use them.

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


def log_media(artifacts: ArtifactStore) -> None:
    """Sound, points, and how a classifier does, as `quark ui` shows them."""
    chance = np.random.default_rng(2)
    artifacts.log_audio("tone", np.sin(np.arange(8000) * 0.3), sample_rate_hz=8000, step=120)
    artifacts.log_point_cloud("scan", chance.normal(size=(500, 3)), step=120)
    truth = chance.integers(0, 2, 200)
    scores = truth * 0.4 + chance.random(200) * 0.6
    artifacts.log_confusion_matrix("classes", truth, scores > 0.5, labels=["cat", "dog"], step=120)
    curve = artifacts.log_roc_curve("roc", truth, scores, step=120)
    print("area:", round(dict(curve.metadata or {})["auc"]["1"], 2))
    artifacts.log_markdown("notes", "# Warm-up\n\nThe **second** half is noise.", step=120)


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

        log_media(artifacts)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.txt").write_text("one two three")
            artifacts.log_directory(folder, name="corpus", aliases=["gold"]).wait()

        print("loaded:", artifacts.load(snapshot))
        print("bins:", len(artifacts.load(histogram.id)["bins"]))
        with artifacts.open(checkpoint) as stream:
            print("checkpoint:", np.load(stream).shape)
        found = artifacts.read(namespace="layers/encoder", step_min=100)
        print("found:", [record.artifact_name for record in found])
        print("the file lies in", Path(session.run_path, str(histogram.payload_relative_path)))
    print(f"list them with: quark artifacts {session.run_id}")
    with TrainingSession.start_run(
        project="artifact-demo", storage_dir=arguments.storage_dir
    ) as later:
        corpus = later.use_artifact("corpus:gold")
        print(corpus.name, "holds", [path.name for path in corpus.path.iterdir()])
    print(f"and see who uses what with: quark artifacts lineage {session.run_id}")


if __name__ == "__main__":
    main()
