"""The calls that the migration pages list, each beside Quark's: both are run.

Ours are run for each tracker in a process of its own, calls and commands; theirs too where the
tracker is installed here. What needs an account or a server is only compiled.
"""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
from blocks import DOCS
from test_blocks import clean_environment

# The page of each tracker, and those of its sections that have a table.
PAGES = {
    "W&B": ("wandb.md", ("Calls", "Sweeps")),
    "MLflow": ("mlflow.md", ("Calls",)),
    "TensorBoard": ("tensorboard.md", ("Calls",)),
    "Aim": ("others.md", ("Aim",)),
    "Neptune": ("others.md", ("Neptune",)),
    "Comet": ("others.md", ("Comet",)),
    "ClearML": ("others.md", ("ClearML",)),
    "Track and tqdm": ("others.md", ("Track and tqdm",)),
    "Ato": ("others.md", ("Ato",)),
    "Optuna and Ray Tune": ("others.md", ("Optuna and Ray Tune",)),
}
TRACKERS = tuple(PAGES)
TIMEOUT_S = 200

# What both sides of a row may name.
COMMON = """
import os, pathlib
import matplotlib.figure, numpy, torch
array = numpy.zeros((8, 8), "uint8")
values = numpy.linspace(-1.0, 1.0, 100)
sound = numpy.zeros(1600, "float32")
labels, scores = numpy.array([0, 1, 1, 0]), numpy.array([0.1, 0.9, 0.8, 0.3])
figure = matplotlib.figure.Figure()
figure.add_subplot().plot([0, 1])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.save(model.state_dict(), "model.pt")
pathlib.Path("data").mkdir()
pathlib.Path("data/train.csv").write_text("1,2")
"""
OURS = "import quark\n"
# Behind the first row, which makes the session.
OURS_AFTER_START = """
artifacts, events = quark.ArtifactStore(session), quark.EventLogger(session)
run_id, step = session.run_id, 2

def wait_for_sources():
    import time
    for _ in range(600):
        try:
            return quark.read_sources(session)
        except quark.ArtifactNotFoundError:
            time.sleep(0.1)
            session.flush()
"""
# Behind the calls, for the commands; those of sweeps have a store of their own.
COMMANDS = """
import re, subprocess, sys, threading
RUN = globals().get("run_id", "")

def call(*words):
    words = [RUN if word == "RUN" else sys.executable if word == "python" else word
             for word in words]
    folder = "../sweeps" if words[0] == "sweep" else "."
    command = [sys.executable, "-m", "quark", *words]
    if words == ["ui"]:
        command += ["--no-open", "--port", "0"]
        page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert re.search("http://", page.stdout.readline())
        page.terminate()
        page.wait()
        return
    subprocess.run(command, cwd=folder, check=True)

pathlib.Path("../sweeps").mkdir()
pathlib.Path("../sweeps/sweep.yaml").write_text(
    "method: random\\nmetric: {name: val/acc, goal: maximize}\\n"
    "parameters:\\n  lr: {min: 0.1, max: 1.0}\\n")
pathlib.Path("../sweeps/train.py").write_text(
    "import quark\\nwith quark.start_run(project='digits') as session:\\n"
    "    quark.MetricsLogger(session).log('val/acc', 0.9, step=1)\\n")
"""
THEIRS = {
    "W&B": "import wandb\n",
    "MLflow": "import mlflow\nmlflow.set_tracking_uri('sqlite:///mlflow.db')\n",
    "TensorBoard": "from torch.utils.tensorboard import SummaryWriter\n",
}
THEIRS_AFTER_START = {"MLflow": "mlflow_run_id = mlflow.active_run().info.run_id\n"}
LIBRARY = {"W&B": "wandb", "MLflow": "mlflow", "TensorBoard": "tensorboard"}
# Calls that nobody can make here, and why.
ONLY_COMPILED = {
    "wandb.use_artifact(": "needs an account",
    "wandb.Api(": "needs an account",
    "wandb.init(id=": "needs an account",
    "wandb.init(fork_from=": "needs an account",
    "sweep_id = wandb.sweep(": "needs an account",
    "wandb.agent(": "needs an account",
    'wandb.log({"sound"': "needs the package soundfile",
    "mlflow.pytorch.log_model(": "takes a minute",
    "mlflow.MlflowClient().set_registered_model_alias(": "needs a registered model",
}


def read_rows(tracker):
    """The rows of a tracker's tables: statements there, statements here."""
    name, titles = PAGES[tracker]
    page = (DOCS / "migrate" / name).read_text("utf-8")
    rows = []
    for title in titles:
        section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for line in section.splitlines():
            if line.startswith("| `"):
                theirs, ours = line.strip("| ").split(" | ")
                rows.append((read_code(theirs), read_code(ours) + read_calls(ours)))
    return rows


def read_code(cell):
    """The statements of a cell: the code before its first prose, parts joined by semicolons."""
    found = re.match(r"`[^`]+`(?:; `[^`]+`)*", cell)
    return re.findall(r"`([^`]+)`", found[0]) if found else []


def read_calls(cell):
    """The calls and commands that a cell has behind its first prose."""
    leading = re.match(r"(?:`[^`]+`(?:; `[^`]+`)*)?", cell)[0]
    found = re.findall(r"`([^`]+)`", cell[len(leading) :])
    return [each for each in found if re.match(r"quark \w", each) or has_call(each)]


def has_call(statement):
    return is_python(statement) and any(
        isinstance(node, ast.Call) for node in ast.walk(ast.parse(statement))
    )


def is_python(statement):
    try:
        ast.parse(statement)
    except SyntaxError:
        return False
    return True


def run_lines(lines, tmp_path):
    """Runs lines as a program whose traceback names the one that fails."""
    folder = tmp_path / "program"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    (folder / "program.py").write_text("\n".join(lines), "utf-8")
    ran = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=clean_environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("tracker", TRACKERS)
def test_both_sides_of_a_row_are_code_or_a_command(tracker):
    rows = read_rows(tracker)
    assert len(rows) > 10
    for theirs, ours in rows:
        assert theirs
        for statement in [*theirs, *ours]:
            assert is_python(statement) or re.match(
                r"(wandb|mlflow|tensorboard|aim|optuna|quark) ", statement
            ), statement


@pytest.mark.long
@pytest.mark.parametrize(
    "tracker", [TRACKERS[0], *(pytest.param(each, marks=pytest.mark.long) for each in TRACKERS[1:])]
)
def test_what_is_written_here_runs(tracker, tmp_path):
    rows = read_rows(tracker)
    lines = [COMMON, OURS, *rows[0][1]]
    has_session = any(statement.startswith("session = ") for statement in rows[0][1])
    if has_session:
        lines.append(OURS_AFTER_START)
    for _, ours in rows[1:]:
        if has_session:
            # A reader sees what has arrived.
            lines.append("session.status == 'running' and session.flush()")
        if any("read_sources" in statement for statement in ours):
            # The code is looked at while the training goes on.
            lines.append("wait_for_sources()")
        lines += [statement for statement in ours if is_python(statement)]
    lines.append(COMMANDS)
    for _, ours in rows:
        # Each statement was run above, or is a command.
        lines += [f"call(*{shlex.split(each)[1:]!r})" for each in ours if not is_python(each)]
    run_lines(lines, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("tracker", sorted(LIBRARY))
def test_what_is_written_there_runs(tracker, tmp_path):
    if importlib.util.find_spec(LIBRARY[tracker]) is None:
        pytest.skip(f"needs {LIBRARY[tracker]}")
    rows = read_rows(tracker)
    lines = [COMMON, THEIRS[tracker], *rows[0][0], THEIRS_AFTER_START.get(tracker, "")]
    for theirs, _ in rows[1:]:
        lines += [
            statement
            for statement in theirs
            if is_python(statement) and not statement.startswith(tuple(ONLY_COMPILED))
        ]
    run_lines(lines, tmp_path)
