"""Compiles kernel and hooks into the wheel where there is a compiler; without one it is pure."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("quark_torch", "kernels")


class KernelBuildHook(BuildHookInterface[Any]):
    """Builds the kernel of `quark_torch`; no failure of it fails the installation."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and tag the wheel for this platform only if that worked."""
        if self.target_name != "wheel" or os.environ.get("QUARK_BUILD_KERNEL", "").strip() == "0":
            return
        try:
            libraries = self._build()
            tag = f"py3-none-{_platform_tag()}"
        except Exception as error:  # noqa: BLE001  # whatever it is, the package works without
            self.app.display_warning(f"Quark's kernel was not compiled: {error}")
            return
        build_data["artifacts"] += [f"/{KERNELS.as_posix()}/{each.name}" for each in libraries]
        build_data["pure_python"] = False
        # Any Python of this platform: the kernel knows nothing of the interpreter, and the
        # hooks are of the stable ABI, and looked for only by an interpreter that has it.
        build_data["tag"] = tag

    def _build(self) -> list[Path]:
        folder = Path(self.root) / KERNELS
        spec = importlib.util.spec_from_file_location("building", folder / "building.py")
        assert spec is not None
        assert spec.loader is not None
        building = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(building)
        libraries: list[Path] = [building.build_kernel(folder)]
        try:
            libraries.append(building.build_probing(folder))
        except building.KernelBuildError as error:
            self.app.display_warning(f"Quark's hooks were not compiled: {error}")
        return libraries


def _platform_tag() -> str:
    target = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "")
    if sys.platform == "darwin" and target:
        # The oldest macOS that the compiler was told to make code for.
        major, _, minor = target.partition(".")
        return f"macosx_{major}_{minor or 0}_{platform.machine()}"
    from packaging.tags import sys_tags

    return next(
        tag.platform
        for tag in sys_tags()
        if "manylinux" not in tag.platform and "musllinux" not in tag.platform
    )
