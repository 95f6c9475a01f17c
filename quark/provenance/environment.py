"""The environment of a run: uncommitted git changes, installed packages, numeric switches."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from quark_core.config.redaction import redact_code

MOST_DIFF_BYTES = 1_000_000
"""No more of a diff is kept."""

# Neither a lock nor a program of somebody's: whatever the tree's configuration asks for.
_COMMAND = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "diff", "HEAD"),
    *("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty"),
)
_CUT = "\n[the rest of the diff is not stored]\n"


def read_git_diff(root: Path, timeout_s: float) -> str | None:
    """The diff against HEAD without secrets, at most `MOST_DIFF_BYTES`; None where git fails.

    Args:
        root: Top of the tree.
        timeout_s: How long git may take; it is ended then.
    """
    environ = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # A file, so that neither a pipe that is full nor much of memory is in the way.
        with tempfile.TemporaryFile() as out:
            subprocess.run(
                _COMMAND,
                cwd=root,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=True,
            )
            out.seek(0)
            data = out.read(MOST_DIFF_BYTES + 1)
        text = redact_code(data[:MOST_DIFF_BYTES].decode("utf-8", "replace"))
        return text + _CUT if len(data) > MOST_DIFF_BYTES else text
    return None


# Which distributions are installed, and which of them this program has imported.
#
# Their folders' names say what they are: no metadata is parsed, which would take a second.

_INFO = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+?)-(?P<version>[0-9][^-]*)(?:-[^/]*)?\.(?:dist|egg)-info"
)
_LETTERS = re.compile(r"[-_.]+")
_MOST_PLACES = 200
_MOST_PACKAGES = 5000
# How much of a list of files is looked at once, and of a list of modules at all.
_BLOCK_BYTES = 64 * 1024
_MOST_LIST_BYTES = 8 * 1024 * 1024
# After so many folders others may run.
_FOLDERS_AT_ONCE = 20
_PAUSE_S = 0.0005
# What Quark imports when it needs it, and every interpreter of an environment at its start: that
# it has done so says nothing of a run.
_IDLE_MODULES = frozenset(
    "__main__ __mp_main__ _distutils_hack _virtualenv backports psutil pynvml zstandard".split()
)
_EDITABLE = "__editable__"


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """What was found.

    Attributes:
        versions: Name of each distribution, as it calls itself, -> its version.
        imported: Names of those of which anything was imported, sorted.
        modules: Top-level modules that were looked for.
    """

    versions: dict[str, str]
    imported: tuple[str, ...]
    modules: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """All of them, a line each."""
        return "".join(f"{name}=={version}\n" for name, version in sorted(self.versions.items()))


@dataclass(frozen=True, slots=True)
class _Distribution:
    name: str
    version: str
    info: str


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out in this process; its next run mostly has the same.

    Attributes:
        seen: What it depends on: the path, when each folder on it was changed, and what was
            imported from where.
    """

    seen: tuple[object, ...]
    packages: InstalledPackages


_known: _Known | None = None
# Info of a distribution -> modules that were looked for in its list of files, and those in it.
_listed: dict[str, tuple[frozenset[str], frozenset[str]]] = {}


def find_packages(before: InstalledPackages | None = None) -> InstalledPackages:
    """What is installed on the path of this interpreter, and what of it was imported.

    Meant for a background thread; takes some 10 ms, and lets others run in between. What a run
    before found out in this process is not looked for again. What is imported from a folder without
    distributions (a project's own, an editable one) counts where it is called as its distribution
    is.

    Args:
        before: What was found before: the same again where nothing else was imported since.
    """
    global _known
    modules = _list_imported()
    if before is not None and before.modules == modules.keys():
        return before
    seen = _describe_path(), tuple(sorted(modules.items(), key=itemgetter(0)))
    known = _known
    if known is not None and known.seen[0] != seen[0]:
        _listed.clear()
    if known is None or known.seen != seen:
        known = _known = _Known(seen, _find_packages(modules))
    return known.packages


def _describe_path() -> tuple[object, ...]:
    """The folders on the path, and when each was last given a distribution or lost one."""
    changed: list[object] = []
    for folder in list(sys.path)[:_MOST_PLACES]:
        try:
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))
        except (OSError, ValueError):
            changed.append(folder)
    return tuple(changed)


def _find_packages(modules: Mapping[str, str | None]) -> InstalledPackages:
    found: dict[str, _Distribution] = {}
    folders: set[str] = set()
    for folder in list(sys.path)[:_MOST_PLACES]:
        for distribution in _list_distributions(folder):
            folders.add(folder)
            # What comes first on the path is what is imported.
            found.setdefault(_normalize(distribution.name), distribution)
            if len(found) >= _MOST_PACKAGES:
                break
    imported = {_normalize(name) for name in modules} & found.keys()
    missing = {
        name: place is None
        for name, place in modules.items()
        if _normalize(name) not in found and (place is None or place in folders)
    }
    for number, (key, distribution) in enumerate(found.items()):
        if not missing:
            break
        if number % _FOLDERS_AT_ONCE == _FOLDERS_AT_ONCE - 1:
            time.sleep(_PAUSE_S)
        if key not in imported and (brought := _list_brought(distribution, missing)):
            imported.add(key)
            for name in brought:
                if not missing[name]:
                    del missing[name]
    versions = {distribution.name: distribution.version for distribution in found.values()}
    names = tuple(sorted(found[key].name for key in imported))
    return InstalledPackages(versions, names, frozenset(modules))


def _list_distributions(folder: str) -> Iterator[_Distribution]:
    try:
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                match = _INFO.fullmatch(entry.name)
                if match is not None:
                    # Folders have underscores where names have hyphens.
                    name = match["name"].replace("_", "-")
                    yield _Distribution(name, match["version"], entry.path)
    except OSError:
        return


def _list_imported() -> dict[str, str | None]:
    """Names of imported modules, at the top -> the folder in which the module lies.

    None where it has no file, as a namespace that several distributions may share. Those of the
    standard library are left out.
    """
    library = os.path.dirname(os.__file__)
    names = {name.partition(".")[0] for name in sys.modules.copy()}
    found: dict[str, str | None] = {}
    for name in names - sys.stdlib_module_names - _IDLE_MODULES - {""}:
        try:
            values = object.__getattribute__(sys.modules.get(name), "__dict__")
            file = values.get("__file__")
        except Exception:  # noqa: BLE001 - a module may be of any type
            file = None
        place = None
        if type(file) is str:
            place, base = os.path.split(file)
            if base.startswith("__init__."):
                place = os.path.dirname(place)
        if place != library and not name.startswith(_EDITABLE):
            found[name] = place
    return found


def _list_brought(distribution: _Distribution, modules: Mapping[str, bool]) -> list[str]:
    """Which of some modules a distribution brings, at the top."""
    asked, brought = _listed.get(distribution.info, (frozenset(), frozenset()))
    new = modules.keys() - asked
    if new:
        asked, brought = asked | new, brought | _find_listed(distribution, new)
        _listed[distribution.info] = asked, brought
    return [name for name in modules if name in brought]


def _find_listed(distribution: _Distribution, modules: Set[str]) -> Set[str]:
    """Those of some modules that are in a distribution's list of its files, at the top."""
    listed = _read(os.path.join(distribution.info, "top_level.txt"))
    if listed is not None:
        return modules & {line.strip() for line in listed.splitlines()}
    names = "|".join(re.escape(name) for name in modules).encode("utf-8", "replace")
    pattern = re.compile(rb"^(" + names + rb")[/.]", re.MULTILINE)
    found: set[bytes] = set()
    try:
        with open(os.path.join(distribution.info, "RECORD"), "rb", buffering=0) as file:
            # A list of a hundred thousand files is none to have in memory.
            end = b""
            while block := file.read(_BLOCK_BYTES):
                lines, _, end = (end + block).rpartition(b"\n")
                found.update(pattern.findall(lines))
                if len(end) > _BLOCK_BYTES:
                    break
            found.update(pattern.findall(end))
    except OSError:
        return set()
    return {name for name in modules if name.encode("utf-8", "replace") in found}


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_LIST_BYTES)
    except OSError:
        return None


def _normalize(name: str) -> str:
    return _LETTERS.sub("-", name).lower()


# What decides of numbers besides code and data: processor, libraries, switches.
#
# Only what is imported already is asked: nothing here loads a library, and none of it may fail.

NUMERIC_PACKAGES = frozenset(
    """
    torch torchvision torchaudio numpy scipy jax jaxlib tensorflow keras cupy numba triton pandas
    polars scikit-learn xgboost lightgbm transformers accelerate deepspeed flash-attn xformers
    bitsandbytes lightning pytorch-lightning timm diffusers peft trl einops mkl tbb intel-openmp
    apex transformer-engine torch-geometric optax flax equinox onnxruntime
    """.split()
)
"""Distributions whose version may change what is computed; those of NVIDIA count too."""

_MOST_TEXT = 200


def describe_machine() -> dict[str, Any]:
    """Processor, C library, BLAS and CUDA, as far as they are known to who is imported."""
    return _drop_unknown(
        {
            "cpu": _drop_unknown({"model": _ask(_find_cpu), **_find_torch_cpu()}),
            "libc": _ask(_find_libc),
            "blas": _drop_unknown({"numpy": _ask(_find_numpy_blas), "pools": _ask(_find_pools)}),
            "cuda": _drop_unknown(_find_cuda()),
        }
    )


def describe_switches() -> dict[str, Any]:
    """Switches of torch, jax and accelerate as they are now; the newest ones count."""
    return _drop_unknown(
        {
            "torch": _drop_unknown(_read_torch()),
            "jax": _drop_unknown(_read_jax()),
            "accumulation": _ask(_find_accumulation),
            "distributed": _drop_unknown(_read_distributed()),
        }
    )


def _ask(question: Callable[[], Any]) -> Any:
    """An answer, or None: what is asked may be of any version, or half imported."""
    try:
        value = question()
    except Exception:  # noqa: BLE001 - a library that cannot say is no trouble of the training
        return None
    return value[:_MOST_TEXT] if isinstance(value, str) else value


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {}, "", ())}


def _find_cpu() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model", "cpu model"):
                    return value.strip()
    return platform.processor()


def _find_libc() -> str | None:
    if sys.platform == "win32":
        return None
    names = getattr(os, "confstr_names", {})
    return os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in names else None


def _find_numpy_blas() -> str | None:
    config: Any = sys.modules.get("numpy.__config__")
    blas = config.CONFIG["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def _find_pools() -> list[str]:
    """What threadpoolctl sees: each library, its version and its threads."""
    control: Any = sys.modules.get("threadpoolctl")
    pools = control.threadpool_info()
    return sorted(
        f"{pool.get('internal_api')} {pool.get('version') or ''} {pool.get('num_threads')}"
        for pool in pools
    )


def _find_torch_cpu() -> dict[str, Any]:
    torch = _find_torch()
    return {} if torch is None else {"torch": _ask(torch.backends.cpu.get_cpu_capability)}


def _find_torch() -> Any | None:
    """Torch where it is imported, and whole; on another thread it may be halfway."""
    torch: Any = sys.modules.get("torch")
    is_whole = torch is not None and all(
        hasattr(torch, name) for name in ("backends", "version", "get_num_threads", "compile")
    )
    return torch if is_whole else None


def _find_cuda() -> dict[str, Any]:
    torch = _find_torch()
    if torch is None or torch.version.cuda is None:
        hip = None if torch is None else getattr(torch.version, "hip", None)
        return {"hip": hip}
    return {
        "torch": torch.version.cuda,
        "cudnn": _ask(torch.backends.cudnn.version),
        "nccl": _ask(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
    }


def _read_torch() -> dict[str, Any]:
    torch = _find_torch()
    if torch is None:
        return {}
    backends = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    return {
        "num_threads": _ask(torch.get_num_threads),
        "num_interop_threads": _ask(torch.get_num_interop_threads),
        "default_dtype": _ask(lambda: str(torch.get_default_dtype())),
        "float32_matmul_precision": _ask(torch.get_float32_matmul_precision),
        "deterministic_algorithms": _ask(torch.are_deterministic_algorithms_enabled),
        "cudnn_enabled": _ask(lambda: bool(cudnn.enabled)),
        "cudnn_benchmark": _ask(lambda: bool(cudnn.benchmark)),
        "cudnn_deterministic": _ask(lambda: bool(cudnn.deterministic)),
        "cudnn_allow_tf32": _ask(lambda: bool(cudnn.allow_tf32)),
        "matmul_allow_tf32": _ask(lambda: bool(matmul.allow_tf32)),
        "matmul_fp32_precision": _ask(lambda: str(matmul.fp32_precision)),
        "reduced_fp16_sums": _ask(lambda: bool(matmul.allow_fp16_reduced_precision_reduction)),
        "reduced_bf16_sums": _ask(lambda: bool(matmul.allow_bf16_reduced_precision_reduction)),
        "flash_attention": _ask(backends.cuda.flash_sdp_enabled),
        "mkldnn": _ask(lambda: bool(backends.mkldnn.enabled)),
        "anomaly_detection": _ask(torch.is_anomaly_enabled),
        # Compiled functions bring it in; whether one is used cannot be seen.
        "compile_loaded": "torch._dynamo.convert_frame" in sys.modules,
    }


def _read_jax() -> dict[str, Any]:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return {}
    return {
        "enable_x64": _ask(lambda: bool(jax.config.jax_enable_x64)),
        "default_matmul_precision": _ask(lambda: jax.config.jax_default_matmul_precision),
    }


def _find_accumulation() -> int | None:
    state: Any = sys.modules.get("accelerate.state")
    return int(state.GradientState._shared_state["plugin_kwargs"]["num_steps"])


def _read_distributed() -> dict[str, Any]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not _ask(distributed.is_available):
        return {}
    if not _ask(distributed.is_initialized):
        return {}
    return {
        "backend": _ask(distributed.get_backend),
        "world_size": _ask(distributed.get_world_size),
    }
