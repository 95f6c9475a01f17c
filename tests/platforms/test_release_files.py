"""What a release has: files that install without a compiler, and the workflows that make them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.long
def test_an_sdist_installs_without_a_compiler_and_works(tmp_path):
    environment = {**os.environ, "CC": "false"}
    environment.pop("PYTHONPATH", None)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True)
    [sdist] = tmp_path.glob("*.tar.gz")
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--no-build-isolation", "--no-index", "--target", str(target), str(sdist)]
    done = subprocess.run(install, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))
    environment["PYTHONPATH"] = str(target)
    check = [sys.executable, "-c", "import quark; print(quark.__file__)"]
    found = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(target / "quark" / "__init__.py")
    tried = [sys.executable, str(ROOT / ".ci" / "try_installation.py")]
    done = subprocess.run(tried, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("The installation works.\n")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_what_is_there(path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    for uses in (step["uses"] for step in steps if "uses" in step):
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", uses), uses
    runs = " ".join(step["run"] for step in steps if "run" in step)
    named = re.findall(r"(?:\.ci|tests)/[\w/.]+", runs)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_wheels_are_built_for_each_system_that_the_page_of_systems_names():
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text("utf-8")
    for system in ("ubuntu-24.04", "ubuntu-24.04-arm", "macos-14", "windows-2025"):
        assert re.search(rf"[\[ ]{system}[,\]]", text), system
    assert "--kernel" in (ROOT / "pyproject.toml").read_text("utf-8")
