"""Loading the compiled kernel, if there is one that fits."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
import os
import struct
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quark_torch.kernels.building import PROBING_SOURCE, SOURCE, cache_folder, library_name

INTERFACE = 2
"""Layout of jobs and results; that of the library must be the same."""

_log = logging.getLogger("quark.torch")


class Kernel(NamedTuple):
    """A loaded library.

    Attributes:
        measure: Takes packed jobs, the address of their results, their
            number and a level; releases the interpreter's lock meanwhile.
        level: Best level of this processor: 0 base, 1 AVX2, 2 AVX-512.
        path: Of the library.
        address: Of the function behind `measure`.
    """

    measure: Callable[[bytes, int, int, int], None]
    level: int
    path: Path
    address: int


@functools.cache
def find_kernel() -> Kernel | None:
    """The kernel of this process, or None: then PyTorch's own operations do its work.

    It is None if `QUARK_TORCH_KERNEL` is 0, and if no library of this source
    and this machine is there or it cannot be loaded.
    """
    if os.environ.get("QUARK_TORCH_KERNEL", "").strip() == "0":
        return None
    try:
        name = library_name()
        for folder in (SOURCE.parent, cache_folder()):
            path = folder / name
            if path.is_file() and (kernel := load_library(path)):
                return kernel
        _log.debug("The kernel is not compiled. `python -m quark_torch.kernels` builds it.")
    except (OSError, RuntimeError) as error:  # no source, no home directory
        _log.debug("The compiled kernel was not loaded: %s", error)
    return None


def load_library(path: Path) -> Kernel | None:
    """Load a library, or say at level debug why not."""
    try:
        if _is_cut(path):
            _log.debug("The compiled kernel %s is damaged and is not used.", path)
            return None
        library = ctypes.CDLL(str(path))
        if library.quark_interface() != INTERFACE:
            _log.debug("The compiled kernel %s has another version and is not used.", path)
            return None
        measure = library.quark_measure
        level = library.quark_level(2)
    except (OSError, AttributeError) as error:
        _log.debug("The compiled kernel %s cannot be loaded: %s", path, error)
        return None
    measure.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    measure.restype = None
    address = ctypes.cast(measure, ctypes.c_void_p).value
    return None if address is None else Kernel(measure, level, path, address)


@functools.cache
def find_probing() -> Any:
    """The compiled hooks of this process, or None: then Python does what they do.

    It is None without the kernel, if `QUARK_TORCH_PROBING` is 0, and where no
    library of this source is there or this is no CPython with a lock that it knows.
    """
    if os.environ.get("QUARK_TORCH_PROBING", "").strip() == "0" or find_kernel() is None:
        return None
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        name = library_name(PROBING_SOURCE)
        for folder in (PROBING_SOURCE.parent, cache_folder()):
            path = folder / name
            if path.is_file() and (module := load_probing(path)):
                return module
    except (OSError, RuntimeError) as error:
        _log.debug("The compiled hooks were not loaded: %s", error)
    return None


def load_probing(path: Path) -> Any:
    """Load compiled hooks, or say at level debug why not."""
    try:
        if _is_cut(path):
            _log.debug("The compiled hooks %s are damaged and are not used.", path)
            return None
        name = "quark_torch.kernels.probing"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        _log.debug("The compiled hooks %s cannot be loaded: %s", path, error)
        return None
    return module


def _is_cut(path: Path) -> bool:
    """True of an ELF file without its end: loading one would end the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return header[:4] == b"\x7fELF"
    order = "<" if header[5] == 1 else ">"
    (sections_at,) = struct.unpack_from(f"{order}Q", header, 40)
    size, count = struct.unpack_from(f"{order}HH", header, 58)
    return bool(sections_at + size * count > path.stat().st_size)
