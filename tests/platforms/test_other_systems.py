"""What only Linux has is not needed: it is hidden here, and mypy looks for it."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quark

ROOT = Path(__file__).parents[2]
MODULES = ("os", "signal", "select", "socket", "time", "mmap", "asyncio")
MISSING = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
STDLIB_OF_LINUX = """
import as_on_windows, os, select, signal
assert hasattr(os, "fork") and hasattr(signal, "SIGHUP") and hasattr(select, "poll")
from quark_core.system import process
from quark.cli import follow
assert not hasattr(process.os, "fork") and not hasattr(follow.signal, "SIGHUP")
assert not hasattr(follow.select, "poll") and not process.os.supports_dir_fd
try:
    exec("import fcntl", {"__name__": "quark_core.x"})
except ImportError:
    print("hidden")
"""
TRAINING = """
import sys, quark
with quark.start_run(project="p", storage_dir=sys.argv[1], backends="csv") as session:
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    artifacts = quark.ArtifactStore(session)
    telemetry = quark.SystemTelemetry(session)
    for step in range(200):
        with telemetry.start_step(step) as scope:
            scope.mark_data_ready()
            metrics.log("loss", 1.0 / (step + 1), step=step)
    artifacts.log_table("scores", [{"a": 1}])
    events.log("checkpoint_saved")
    session.flush("durable")
    assert len(metrics.read(metric_key="loss")) == 200
    quark.AnalyzerEngine(session).analyze()
assert session.report_delivery().complete
print(session.run_id)
"""
COMMANDS = [
    "runs",
    "show RUN",
    "analyze RUN",
    "follow RUN --once",
    "follow RUN --interval 0.1",
    "compare RUN RUN",
    "report RUN -o report.html",
    "export RUN --format csv -o out",
    "artifacts RUN",
    "du",
    "doctor",
    "sync",
    "gc",
    "edit RUN --name other",
    "backup backup",
    "backup --verify backup",
    "rm RUN --yes",
]


def find_names_missing_on_windows(module):
    """Names that the stubs of the standard library give to other systems alone."""
    import mypy

    folder = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    path = folder / module / "__init__.pyi"
    tree = ast.parse((path if path.exists() else folder / f"{module}.pyi").read_text("utf-8"))
    here, there = set(), set()

    def holds(test):
        """Whether a condition holds on Windows and on the newest Python; None: it does not say."""
        text = ast.unparse(test)
        if "sys.platform" not in text:
            return True
        return bool(
            eval(text, {"sys": type("", (), {"platform": "win32", "version_info": (3, 13)})})
        )

    def walk(body, exists):
        for node in body:
            if isinstance(node, ast.If):
                walk(node.body, exists and holds(node.test))
                walk(
                    node.orelse,
                    exists and not ("platform" in ast.unparse(node.test) and holds(node.test)),
                )
                continue
            names = (
                [node.name]
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                else [node.target.id]
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                else [each.asname or each.name for each in node.names]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            (here if exists else there).update(names)

    walk(tree.body, exists=True)
    return sorted(there - here)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment whose interpreters have no more than Windows has, as far as Quark sees."""
    folder = tmp_path_factory.mktemp("as_on_windows")
    shutil.copy(Path(__file__).with_name("as_on_windows") / "sitecustomize.py", folder)
    missing = {
        "modules": MISSING,
        "names": {module: find_names_missing_on_windows(module) for module in MODULES},
    }
    assert {"fork", "getuid", "pread", "statvfs"} <= set(missing["names"]["os"])
    assert {"SIGKILL", "SIGHUP", "setitimer"} <= set(missing["names"]["signal"])
    assert "poll" in missing["names"]["select"]
    assert "getpid" not in missing["names"]["os"]
    (folder / "missing.json").write_text(json.dumps(missing), "utf-8")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "QUARK_QUIET": "1"}


def run(environment, *command, cwd):
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_what_windows_lacks_is_hidden_from_quark_alone(environment, tmp_path):
    done = run(environment, sys.executable, "-c", STDLIB_OF_LINUX, cwd=tmp_path)
    assert done.stdout == "hidden\n"


@pytest.mark.long
def test_a_run_is_made_read_judged_backed_up_and_removed_with_what_windows_has(
    environment, tmp_path
):
    done = run(environment, sys.executable, "-c", TRAINING, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.strip()
    assert len(quark.MetricsLogger(quark.open_run(run_id, tmp_path)).read(metric_key="loss")) == 200
    for command in COMMANDS:
        words = command.replace("RUN", run_id).split()
        done = run(environment, sys.executable, "-m", "quark", *words, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert "is in the trash" in done.stdout or run_id[:8] in done.stdout


@pytest.mark.long
def test_the_page_is_served_with_what_windows_has(environment, tmp_path):
    import httpx

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    command = [sys.executable, "-m", "quark", "ui", "--no-open", "--port", "0"]
    server = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told = next(line for line in server.stdout if "http://" in line)
        address = re.search(r"http://\S+", told).group()
        with httpx.Client(follow_redirects=True) as client:
            page = client.get(address)
            assert page.status_code == 200
            assert "text/html" in page.headers["content-type"]
    finally:
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate(timeout=60)
    assert "Traceback" not in rest


def test_a_server_says_that_it_does_not_run_there(environment, tmp_path):
    command = [sys.executable, "-m", "quark", "serve", "--store", "sqlite:///s.db"]
    done = run(environment, *command, cwd=tmp_path)
    assert done.returncode == 1
    assert "runs on Linux and macOS only" in done.stderr
    assert "QUARK_PERSISTENCE_URL" in done.stderr
    assert not (tmp_path / "s.db").exists()


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_nothing_is_asked_of_a_system_that_it_has_not(platform, tmp_path):
    # What is checked for one system alone ends there, and the rest is unreachable on the other.
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--no-warn-unreachable"]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
