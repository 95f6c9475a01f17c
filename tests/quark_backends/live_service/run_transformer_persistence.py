"""Train a small transformer against a live persistence service, and check what arrived.

    export QUARK_PERSISTENCE_URL=https://quark.example.org QUARK_USER_KEY=qk_...
    python tests/quark_backends/live_service/run_transformer_persistence.py [--steps 60]

    python tests/quark_backends/live_service/run_transformer_persistence.py --start

With --start it runs a service of its own, in a folder that goes with it. Uses
metrics, events, telemetry, layer summaries, parameter diagnostics, artifacts
and batch diagnostics, interrupts the run and resumes it, then reads
everything back and counts. Exit status 0 where every count is right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import quark

WIDTH, VOCABULARY, LENGTH, BATCH = 32, 17, 12, 8
LAYER_EVERY, PARAMETER_EVERY = 5, 10


class Copier(nn.Module):
    """Learns to repeat the token that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(hidden))


def train(session: quark.TrainingSession, first_step: int, steps: int) -> dict[str, int]:
    """Train for some steps; returns how much of what was logged, by kind."""
    model = Copier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counts = dict.fromkeys(
        ("metric", "event", "telemetry", "layer", "parameter", "distribution", "batch"), 0
    )
    with (
        quark.MetricsLogger(session) as metrics,
        quark.EventLogger(session) as events,
        quark.SystemTelemetry(
            session, config=quark.SystemTelemetryConfig(emit_scalar_metrics=False)
        ) as telemetry,
        quark.HookEngine(
            session,
            model,
            optimizer,
            config=quark.HookEngineConfig(
                schedule=quark.HookScheduleConfig(every_n_steps=LAYER_EVERY)
            ),
        ) as hooks,
        quark.ParameterDiagnostics(
            session,
            model,
            optimizer,
            config=quark.ParameterDiagnosticsConfig(
                schedule=quark.HookScheduleConfig(every_n_steps=PARAMETER_EVERY),
                capture_distributions=True,
            ),
        ) as parameters,
        quark.DataDiagnostics(session) as diagnostics,
    ):
        for step in range(first_step, first_step + steps):
            with telemetry.start_step(step) as scope:
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
                targets = tokens.roll(1, dims=1)
                scope.mark_data_ready()
                optimizer.zero_grad(set_to_none=True)
                with hooks.step(step):
                    logits = model(tokens)
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                    loss.backward()
                optimizer.step()
                summaries, distributions = parameters.snapshot(step)
            metrics.log("train/loss", loss.item(), step=step)
            metrics.log("optimizer/lr", optimizer.param_groups[0]["lr"], step=step)
            diagnostics.log_batch(loss.item(), step=step, batch_size=BATCH)
            counts["metric"] += 2
            counts["telemetry"] += 1
            counts["batch"] += 1
            counts["parameter"] += len(summaries)
            counts["distribution"] += len(distributions)
            if step % 10 == 0:
                events.log("checkpoint_saved", step=step, payload={"path": f"step-{step}.pt"})
                counts["event"] += 1
        counts["layer"] += len(hooks.read(step_min=first_step))
    return counts


def check(folder: Path, steps: int) -> list[str]:
    """Train, interrupt, resume, read back; returns what is wrong."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    session = quark.start_run(
        project="transformer-persistence",
        config={"width": WIDTH, "steps": steps},
        tags=["live-service"],
        storage_dir=folder,
    )
    first = train(session, 0, steps)
    artifacts = quark.ArtifactStore(session)
    stored = artifacts.log_snapshot("warmup", {"best_loss": 1.5}, step=steps)
    weights = folder / "weights.pt"
    torch.save(Copier().state_dict(), weights)
    checkpoint = artifacts.log_file(weights, artifact_type="checkpoint", step=steps)
    session.end_run("interrupted")
    print(f"run {session.run_id}: {session.run_path}")

    resumed = quark.resume_run(run_id=session.run_id, storage_dir=folder)
    second = train(resumed, steps, steps)
    resumed.add_tag("resumed")
    resumed.end_run()
    expected = {kind: first[kind] + second[kind] for kind in first}

    # As another machine would: by the id alone, from a folder of its own.
    opened = quark.open_run(session.run_id, folder / "elsewhere")
    parameters = quark.ParameterDiagnostics(opened, Copier())
    found = {
        "metric": len(quark.MetricsLogger(opened).read()),
        "event": len(quark.EventLogger(opened).read(event_type="checkpoint_saved")),
        "telemetry": len(quark.SystemTelemetry(opened).read(boundary="step")),
        "layer": len(quark.HookEngine(opened, Copier()).read()),
        "parameter": len(parameters.read_summaries()),
        "distribution": len(parameters.read_distributions()),
        "batch": len(quark.DataDiagnostics(opened).read()),
    }
    wrong = []
    for kind, count in expected.items():
        print(f"{kind:>12}: {found[kind]} of {count}")
        if found[kind] != count or not count:
            wrong.append(f"{kind}: {found[kind]} records instead of {count}")
    losses = quark.MetricsLogger(opened).series("train/loss", max_points=10)
    store = quark.ArtifactStore(opened)
    checks = {
        "status": opened.status == "completed",
        "attempts": opened.context.run.resume_count == 1,
        "tags": opened.context.run.tags == ("live-service", "resumed"),
        "curve": losses.points == 2 * steps,
        "snapshot": store.load(stored.id) == {"best_loss": 1.5},
        "checkpoint": store.load_file(checkpoint.id, folder / "copy").read_bytes()
        == weights.read_bytes(),
        "search": [
            run.run_id
            for run in quark.search_runs(
                storage_dir=folder, where="'resumed' in tags and train/loss > 0"
            )
        ].count(str(session.run_id))
        == 1,
        "analysis": len(quark.AnalyzerEngine(opened).analyze().health_scores) > 0,
        "delivery": resumed.report_delivery().lanes[0].waiting == 0,
    }
    for name, is_right in checks.items():
        print(f"{name:>12}: {'right' if is_right else 'WRONG'}")
        wrong += [] if is_right else [name]
    return wrong


@contextlib.contextmanager
def start_service(folder: Path) -> Iterator[tuple[str, str]]:
    """A service of our own; its URL and a key."""
    command = [sys.executable, "-m", "quark"]
    store = f"sqlite:///{folder / 'service.db'}"
    process = subprocess.Popen(
        [*command, "serve", "--store", store, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = None
        while url is None and (line := process.stdout.readline()):
            if match := re.search(r"serves on (http\S+)", line):
                url = match[1]
        if url is None:
            raise SystemExit("the service did not start")
        key = subprocess.run(
            [*command, "keys", "create", "--store", store],
            capture_output=True,
            text=True,
            check=True,
        )
        match = re.search(r"qk_\S+", key.stdout)
        assert match is not None
        yield url, match[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train against a live persistence service.")
    parser.add_argument("--steps", type=int, default=60, help="of each of the two attempts")
    parser.add_argument("--start", action="store_true", help="run a service of its own")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch, "transformer-persistence")
        folder.mkdir()
        if arguments.start:
            url, key = stack.enter_context(start_service(Path(scratch)))
            os.environ["QUARK_PERSISTENCE_URL"], os.environ["QUARK_USER_KEY"] = url, key
        elif not os.environ.get("QUARK_PERSISTENCE_URL"):
            parser.error("set QUARK_PERSISTENCE_URL and QUARK_USER_KEY, or give --start")
        wrong = check(folder, arguments.steps)
    if wrong:
        print(f"failed: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    print("Everything arrived.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
