"""Start a run, tag it, log to it, end it; then resume one that was interrupted.

python examples/session_lifecycle.py [STORAGE_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

import quark


def main() -> None:
    storage_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "quark-runs").resolve()

    session = quark.start_run(
        project="lifecycle-demo",
        config={"model": "resnet18", "optimizer": "adamw", "lr": 3e-4},
        tags=["example"],
        storage_dir=storage_dir,
    )
    session.add_tag("baseline")
    session.add_log("Warm-up is done.", identifier="Info", step=0)
    with quark.MetricsLogger(session) as metrics:
        for step in range(10):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
        session.end_run(status="interrupted")
    print(f"started and interrupted: {session.run_id} ({session.status})")

    resumed = quark.resume_run(run_id=session.run_id, storage_dir=storage_dir)
    resumed.add_tag("recovered")
    resumed.add_log("Went on after maintenance.", identifier="Info")
    with quark.MetricsLogger(resumed) as metrics:
        metrics.log("train/loss", 0.05, step=10)
        print(f"values over both attempts: {len(metrics.read(metric_key='train/loss'))}")
    resumed.end_run()

    with quark.EventLogger(quark.open_run(resumed.run_id, storage_dir)) as events:
        print("events:", ", ".join(event.event_type for event in events.read()))
    print(f"tags: {', '.join(resumed.reload().run.tags)}")
    print(f"the run lies in {resumed.run_path}")


if __name__ == "__main__":
    main()
