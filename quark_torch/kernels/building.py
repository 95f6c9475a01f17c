"""Compiling the kernel and the hooks, with nothing but the standard library.

The package's build runs this file by its path, before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("lean.c")
PROBING_SOURCE = SOURCE.with_name("probing.c")
_TIMEOUT_S = 120
_COMMON = ("-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-fno-math-errno")
_SIMD = ("-fno-trapping-math", "-ffp-contract=fast")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq")
# One library holds every level, and the processor it runs on decides: a wheel travels.
_X86_LEVELS = {
    "v3": _AVX2,
    "v4": (*_AVX2, *_AVX512, "-mprefer-vector-width=512"),
}


class KernelBuildError(Exception):
    """The kernel could not be compiled; everything works without it, more slowly."""


def library_name(source: Path | None = None) -> str:
    """File name of the library of a source, by default the kernel's, on this machine.

    A library of another source, system or architecture has another name, and
    so is never loaded by mistake.
    """
    source = source or SOURCE
    digest = hashlib.sha256(source.read_bytes())
    for part in sorted(source.parent.glob(f"{source.stem}_*.h")):
        digest.update(part.read_bytes())
    return f"{source.stem}-{digest.hexdigest()[:12]}-{sys.platform}-{platform.machine().lower()}.so"


def cache_folder() -> Path:
    """Where the library goes if the package's own folder cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quark" / "kernels"


def build_kernel(folder: Path) -> Path:
    """Compile the kernel into a folder, and take older ones out of the package.

    Raises:
        KernelBuildError: There is no compiler (`$CC`, else cc, gcc or clang),
            or it does not compile the base level; the message says which.
    """
    compiler = _find_compiler()
    target = folder / library_name()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        objects = [_compile(compiler, scratch, "base", ())]
        levels = _X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else {}
        have = []
        for level, flags in levels.items():
            try:
                objects.append(_compile(compiler, scratch, level, flags))
            except KernelBuildError:
                continue  # an older compiler: the level below does
            have.append(f"-DHAVE_{level}")
        dispatch = scratch / "dispatch.o"
        _run(
            [*compiler, *_COMMON, "-DDISPATCH", *have, "-c", str(SOURCE), "-o", str(dispatch)],
        )
        library = scratch / "lean.so"
        _run(
            [*compiler, "-shared", *map(str, objects), str(dispatch), "-o", str(library), "-lm"],
        )
        _put(library, target)
    return target


def build_probing(folder: Path) -> Path:
    """Compile the hooks, an extension module for every Python from 3.11, into a folder.

    Raises:
        KernelBuildError: As of `build_kernel`; or Python's headers are not there.
    """
    headers = sysconfig.get_paths()["include"]
    if not Path(headers, "Python.h").is_file():
        raise KernelBuildError(f"{headers} has no Python.h. Install Python's headers")
    compiler = _find_compiler()
    target = folder / library_name(PROBING_SOURCE)
    # macOS leaves what Python has to be found when the library is loaded only if told so.
    links = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    with tempfile.TemporaryDirectory() as name:
        library = Path(name, "probing.so")
        _run(
            [
                *(*compiler, "-O2", "-fPIC", "-fvisibility=hidden", "-shared", *links),
                *(f"-I{headers}", str(PROBING_SOURCE), "-o", str(library)),
            ]
        )
        _put(library, target)
    return target


def _put(library: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        suffix = f"-{sys.platform}-{platform.machine().lower()}.so"
        # The cache is shared with other versions of this package, its own folder is not.
        stem = target.name.partition("-")[0]
        stale = target.parent.glob(f"{stem}-*{suffix}") if target.parent == SOURCE.parent else ()
        for old in stale:
            if old != target:
                old.unlink(missing_ok=True)
        # By a rename, since another process may be loading what was there.
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        shutil.copy(library, part)
        part.replace(target)
    except OSError as error:
        raise KernelBuildError(f"{target} could not be written: {error}") from error


def _find_compiler() -> list[str]:
    if sys.platform == "win32":
        # Its gcc lays the stack out so that AVX code may crash, and MSVC knows none of the options.
        raise KernelBuildError("native code cannot be built on Windows")
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise KernelBuildError("no C compiler was found. Install gcc or clang, or set CC")


def _compile(compiler: list[str], scratch: Path, level: str, flags: tuple[str, ...]) -> Path:
    to = scratch / f"{level}.o"
    _run(
        [*compiler, *_COMMON, *_SIMD, *flags, f"-DLEVEL={level}", "-c", str(SOURCE), "-o", str(to)],
    )
    return to


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise KernelBuildError(f"{shlex.join(command[:1])} failed: {lines[0]}")
