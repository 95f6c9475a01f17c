"""The code of a run is its user's: no mirror gets any of it without being told to."""

import base64
import os
import subprocess
import sys
import zlib
from importlib.util import find_spec

import pytest
from wide_bounds import keep_sources_in_children

SECRET = "NOBODY_ELSE_HAS_THIS"
TRAIN = """
import sys, model, quark
backends = ["embedded", sys.argv[1]]
with quark.start_run(project="p", storage_dir="store", backends=backends) as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
print(session.run_id)
"""


@pytest.fixture
def train(tmp_path):
    """Trains with a mirror; gives the run's id."""
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    (project / "train.py").write_text(TRAIN)
    (project / "model.py").write_text(f"import pkg.deep\n{SECRET} = 1\n")
    (project / "pkg" / "deep.py").write_text("x = 1\n")

    def run(backend):
        environ = {
            **os.environ,
            **keep_sources_in_children(),
            "WANDB_MODE": "offline",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        done = subprocess.run(
            [sys.executable, "train.py", backend],
            cwd=project,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    run.project = project
    return run


def find_files_with_code(*folders):
    """Files in which the code stands, as it is, packed, or in base64."""
    found = []
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file() and not file.is_symlink():
                data = file.read_bytes()
                plain = SECRET.encode() in data or base64.b64encode(SECRET.encode()) in data
                if plain or data[:2] == b"PK" or _inflate(data).startswith(b'{"form":1,"files"'):
                    found.append(file)
    return found


def _inflate(data):
    try:
        return zlib.decompress(data)
    except zlib.error:
        return b""


@pytest.mark.long
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
@pytest.mark.parametrize("keeps", [False, True])
def test_mlflow_has_the_code_of_who_asks_for_that_alone(train, tmp_path, keeps):
    place = tmp_path / "mlflow.db"
    option = "&sources=1" if keeps else ""
    run_id = train(f"mlflow:sqlite:///{place}?quark=full{option}")
    (tables,) = tmp_path.rglob("mlartifacts/**/artifacts/quark")
    mirror = train.project / "store" / ".quark" / "runs" / run_id / "mirrors"
    told = {
        str(file.relative_to(tables.parent))
        for file in tables.parent.rglob("sources/**/*")
        if file.is_file()
    }
    if not keeps:
        assert told == set()
        assert find_files_with_code(tables.parent, mirror) == []
        return
    names = {"model.py", "pkg/deep.py", "train.py", "packages.txt"}
    assert told == {f"sources/{name}" for name in names}
    assert SECRET in (tables.parent / "sources" / "model.py").read_text()


@pytest.mark.long
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
@pytest.mark.parametrize("keeps", [False, True])
def test_wandb_has_the_code_of_who_asks_for_that_alone(train, keeps):
    run_id = train("wandb:p?sources=1" if keeps else "wandb:p")
    mirror = train.project / "store" / ".quark" / "runs" / run_id / "mirrors"
    logs = [path for path in mirror.rglob("*.wandb") if "latest" not in str(path)]
    assert logs
    assert any(f"quark-source-{run_id}".encode() in log.read_bytes() for log in logs) == keeps
    if not keeps:
        assert find_files_with_code(mirror) == []


@pytest.mark.parametrize("backend", ["csv", "tensorboard"])
def test_other_mirrors_have_nothing_of_it(train, backend):
    if backend == "tensorboard" and find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard")
    run_id = train(backend)
    folder = train.project / "store" / ".quark" / "runs" / run_id
    others = [each for each in folder.iterdir() if each.name not in ("artifacts", "journal")]
    found = [each for each in others if each.is_dir()]
    assert find_files_with_code(*found) == []
    for table in folder.rglob("artifacts*.csv"):
        assert "kept_sources" not in table.read_text()
