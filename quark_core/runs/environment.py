"""The environment of a run: interpreter, packages, host, GPUs, command line, git state."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quark_core.backends.registry import default_registry
from quark_core.config.redaction import redact_arguments, redact_text
from quark_core.errors import SchemaValidationError
from quark_core.ranks.launches import RankInfo
from quark_core.records import EnvironmentSnapshot
from quark_core.records.json_object import JsonObject, normalize_json
from quark_core.runs.open_run import OpenRun
from quark_core.system.process import importing, start_thread

_PACKAGES = """
    quark-tracker torch torchvision torchaudio numpy scipy pandas polars scikit-learn jax jaxlib
    flax tensorflow keras transformers datasets tokenizers accelerate diffusers peft trl lightning
    pytorch-lightning deepspeed timm torchmetrics mlflow wandb xgboost lightgbm triton hydra-core
    omegaconf
""".split()
WELL_KNOWN_PACKAGES = frozenset(_PACKAGES)
"""Packages whose versions are recorded wherever they are installed, imported or not."""

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "CONDA_DEFAULT_ENV",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_PORT",
    "NODE_RANK",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT",
)
SECTIONS = frozenset(
    """
    python host process launch variables git packages gpus cpu libc blas cuda switches imported
    installed
    """.split()
)
"""What is recorded of an environment. Other sections are what another tool said of an imported
run, for people: ids, links, folders, notes."""

_GIT_TIMEOUT_S = 10.0


class GitState:
    """What `.git` says without starting git.

    Attributes:
        root: Top of the working tree.
        commit: Full hash of HEAD, or None before the first commit.
        branch: Name of the branch, or None on a detached HEAD.
    """

    __slots__ = ("branch", "commit", "root")

    def __init__(self, root: Path, commit: str | None, branch: str | None) -> None:
        self.root = root
        self.commit = commit
        self.branch = branch


def read_git_state(start: Path) -> GitState | None:
    """Commit and branch of the working tree that holds `start`; None where there is none.

    Reads `.git` itself, which takes tens of microseconds where starting git
    takes milliseconds. Work trees and submodules (a `.git` file) are followed.
    """
    try:
        for folder in (start, *start.parents):
            entry = folder / ".git"
            if entry.is_file():
                target = entry.read_text().partition("gitdir:")[2].strip()
                return _read_git_dir(folder, (folder / target).resolve())
            if (entry / "HEAD").is_file():
                return _read_git_dir(folder, entry)
    except (OSError, UnicodeDecodeError):
        return None
    return None


def _read_git_dir(root: Path, git_dir: Path) -> GitState:
    head = (git_dir / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return GitState(root, head or None, None)
    reference = head.partition(":")[2].strip()
    branch = reference.removeprefix("refs/heads/")
    common = git_dir
    if (git_dir / "commondir").is_file():
        common = (git_dir / (git_dir / "commondir").read_text().strip()).resolve()
    for folder in (git_dir, common):
        if (folder / reference).is_file():
            return GitState(root, (folder / reference).read_text().strip(), branch)
    packed = common / "packed-refs"
    if packed.is_file():
        for line in packed.read_text().splitlines():
            commit, _, name = line.partition(" ")
            if name == reference:
                return GitState(root, commit, branch)
    return GitState(root, None, branch)


def capture_environment(rank: RankInfo, git: GitState | None) -> dict[str, Any]:
    """The part that is known in microseconds; `complete_environment` finds the rest."""
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": sys.implementation.name,
            "executable": sys.executable,
        },
        "host": {
            "name": platform.node(),
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "cpu_count": os.cpu_count(),
        },
        "process": {
            "pid": os.getpid(),
            "cwd": _working_directory(),
            "argv": redact_arguments(sys.argv),
        },
        "launch": {
            "rank": rank.rank,
            "local_rank": rank.local_rank,
            "world_size": rank.world_size,
            "source": rank.source,
        },
        "variables": {
            name: redact_text(os.environ[name]) for name in _VARIABLES if name in os.environ
        },
        "git": None if git is None else {"commit": git.commit, "branch": git.branch},
    }


def complete_environment(
    known: dict[str, Any], git: GitState | None, facts: Mapping[str, Any] = MappingProxyType({})
) -> EnvironmentSnapshot:
    """Add what takes time: package versions, GPUs, and whether the tree is dirty.

    Meant for a background thread; takes up to seconds.

    Args:
        known: What `capture_environment` has found.
        git: The git tree, if there is one.
        facts: What plugins have found; it replaces what is found here.
    """
    values = dict(known)
    if "packages" not in facts:
        values["packages"] = _find_packages()
    values["gpus"] = _find_gpus()
    if git is not None:
        values["git"] = {**known["git"], "dirty": _is_dirty(git.root)}
    values.update(facts)
    return EnvironmentSnapshot(JsonObject(normalize_json(values, "environment")))


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _find_packages() -> dict[str, str]:
    """Versions of the well-known packages that are installed."""
    found: dict[str, str] = {}
    # What reads the metadata of packages imports late itself.
    with importing():
        from importlib.metadata import PackageNotFoundError, version

        for name in _PACKAGES:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found


def _find_gpus() -> list[dict[str, Any]]:
    try:
        with importing():
            import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            gpus.append(
                {
                    "index": index,
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "driver": pynvml.nvmlSystemGetDriverVersion(),
                }
            )
        return gpus
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _is_dirty(root: Path) -> bool | None:
    with importing():
        import subprocess  # late: it takes milliseconds, and readers never need it

    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip())


_log = logging.getLogger("quark")

# What the training thread still imports for its first value comes before it.
_FIRST_S = 0.1
# What is looked at again may be set by the first steps, and what is imported by them.
_LOOKS_S = (5.0, 60.0)
_ENDING_S = 2.0


class EnvironmentRecorder:
    """Records the environment of a run; for the process that leads it.

    It asks `quark_describe_environment` of every plugin in a thread: at the start, 5 s and 60 s
    later, and at the end. The end waits 2 s at most, and what comes later is not recorded.

    Args:
        run: The run.
        known: The facts that were recorded with the start.
        git: The git tree, if there is one.
    """

    def __init__(self, run: OpenRun, known: dict[str, Any], git: GitState | None) -> None:
        self._run, self._known, self._git = run, known, git
        self._started = time.monotonic()
        self._ending = threading.Event()
        self._first: threading.Thread | None = None
        self._later: threading.Thread | None = None
        self._values: dict[str, Any] = {}
        self._session: object = None
        run.writers.add(self)

    def start(self, session: object) -> None:
        """Begin; without a thread to spare the environment stays as it is known at once.

        Args:
            session: The session of the run, which plugins get.
        """
        self._session = session
        self._first = start_thread(self._look_first, name="quark-environment")
        self._run.background = self._first

    def bind(self) -> None:
        """A forked child leaves this to its parent."""

    def settle(self) -> None:
        """Look for the last time, before the run ends; waits 2 s at most."""
        if self._run.forked:
            return
        self._ending.set()
        deadline = time.monotonic() + _ENDING_S
        if self._first is not None:
            self._first.join(max(0.0, deadline - time.monotonic()))
        if self._later is not None:  # which the first has started
            self._later.join(max(0.0, deadline - time.monotonic()))

    def _look_first(self) -> None:
        self._ending.wait(_FIRST_S)
        try:
            snapshot = complete_environment(self._known, self._git, self._collect_facts())
        except Exception as error:  # noqa: BLE001 - what is known at once must do
            _log.debug("the environment could not be recorded: %s", error)
            return
        if self._run.is_over:
            return
        self._record(snapshot)
        self._later = start_thread(self._look_later, name="quark-environment-later")

    def _look_later(self) -> None:
        for look_s in (*_LOOKS_S, None):
            if look_s is None:
                self._ending.wait()
            else:
                self._ending.wait(max(0.0, self._started + look_s - time.monotonic()))
            if self._run.is_over:
                return
            now = {**self._values, **self._collect_facts()}
            if now != self._values:
                self._record(EnvironmentSnapshot(JsonObject(now)))
            if self._ending.is_set():
                return

    def _collect_facts(self) -> dict[str, Any]:
        """The facts of all plugins; those that are no JSON are left out."""
        facts: dict[str, Any] = {}
        described = default_registry().collect("quark_describe_environment", session=self._session)
        for plugin, found in described:
            try:
                if not isinstance(found, Mapping):
                    raise SchemaValidationError(f"environment is not a mapping: {found!r:.60}")
                facts.update(normalize_json(dict(found), "environment"))
            except Exception as error:  # noqa: BLE001 - whatever a plugin may give
                _log.warning("the facts of plugin %s are not recorded: %s", plugin, error)
        return facts

    def _record(self, snapshot: EnvironmentSnapshot) -> None:
        """Record the environment: of several records of it the newest counts."""
        self._values = dict(snapshot.values)
        self._run.emit_lifecycle("environment", snapshot.values)
        default_registry().notify(
            "quark_environment_recorded", session=self._session, values=snapshot.values
        )
