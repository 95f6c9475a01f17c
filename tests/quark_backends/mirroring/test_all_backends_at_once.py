"""Two ranks, five backends at once, one of another distribution, and a rank that is killed."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "third_party_backend"
for name in ("torch", "mlflow", "sqlalchemy", "wandb", "fsspec"):
    pytest.importorskip(name)
INSTALLED = {each.metadata["Name"] for each in distributions()}
pytestmark = pytest.mark.skipif(
    not {"pip", "hatchling"} <= INSTALLED,
    reason="the example is built and installed with pip and hatchling",
)

# Mirrors are of the first rank, unless they are asked for on others too.
BACKENDS = [
    "embedded",
    "csv:./csvout",
    "mlflow:sqlite:///m.db?ranks=all",
    "wandb:?mode=offline",
    "jsonl:?ranks=all",
]
READABLE = [None, "csv:./csvout", "mlflow:sqlite:///m.db", "jsonl"]
STEPS, KILLED_AT = 120, 50

TRAIN = f"""
import os, signal
import torch
from torch import nn
import quark

rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 2)
)
# The layer in the middle was forgotten.
trained = [*model[0].parameters(), *model[4].parameters()]
optimizer = torch.optim.SGD(trained, 0.1)
inputs = torch.randn(64, 16)
targets = (inputs[:, :2].sum(1) > 0).long()
session = quark.start_run(project="p", ranks="all", backends={BACKENDS!r})
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
metrics = quark.MetricsLogger(session)
with quark.watch(session, model, optimizer, every_n_steps=10) as watch:
    for step in range(0 if is_first else {KILLED_AT // 2}, {STEPS}):
        watch.step(step)
        if is_first and step == {KILLED_AT} and rank == 0:
            session.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        metrics.log("train/loss", loss.item(), step=step)
        metrics.log("train/epoch_loss", loss.item(), step=step, epoch=step // 10)
session.end_run()
if rank == 0:
    print("run", session.run_id)
"""

ANALYZE = """
import json, sys
import quark

for backend in json.loads(sys.argv[2]):
    run = quark.open_run(sys.argv[1], ".", backend=backend)
    result = quark.AnalyzerEngine(run).analyze(store=False)
    points = quark.MetricsLogger(run).read(metric_key="train/loss")
    print(json.dumps({
        "rules": result.to_dict()["rules"],
        "alerts": [[a.rule_id, a.severity, a.step, a.culprit, a.fact] for a in result.alerts],
        "scores": [[s.score_key, s.word, s.score] for s in result.health_scores],
        "points": sorted([one.rank, one.step, one.value] for one in points),
    }))
"""


@pytest.fixture
def run_python(tmp_path, monkeypatch):
    """Runs Python where the third party's distribution is installed."""
    for name in ("QUARK_HELPER_PROCESSES", "QUARK_EXIT_TIMEOUT_SECONDS", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    site = tmp_path / "site"
    subprocess.run([*command, "--target", str(site), str(EXAMPLE)], check=True, timeout=200)
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*arguments, may_fail=False):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert may_fail or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_backend_that_can_be_read_gives_the_same_analysis(run_python, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run_python(*launcher, "--max-restarts", "1", "train.py")
    run_id = said.partition("run ")[2].split()[0]
    deadline = time.monotonic() + 300
    # Exit status 1 says that something waits yet.
    while "No records are waiting" not in run_python("-m", "quark", "sync", may_fail=True):
        assert time.monotonic() < deadline
        time.sleep(1)
    lines = run_python("-c", ANALYZE, run_id, json.dumps(READABLE)).splitlines()
    answers = dict(zip(READABLE, map(json.loads, lines), strict=True))
    own = answers[None]
    assert "stagnant_layers" in {alert[0] for alert in own["alerts"]}
    assert [point[:2] for point in own["points"]] == [[r, s] for r in (0, 1) for s in range(STEPS)]
    for backend in READABLE[1:]:
        assert answers[backend] == own, backend
    folders = list((tmp_path / ".quark" / "runs" / run_id).glob("mirrors/wandb/*/wandb/offline-*"))
    assert len(folders) == 1
