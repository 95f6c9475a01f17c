"""docs/extend/write-a-backend.md says what is so."""

import re
from pathlib import Path

import pytest

from quark.cli.backends import write_skeleton
from quark_core.backends.contract import Capability
from quark_core.testing.kit import BackendKit

GUIDE = (Path(__file__).parents[2] / "docs" / "extend" / "write-a-backend.md").read_text()


def draw_tree(folder, indent=""):
    entries = sorted(folder.iterdir(), key=lambda path: path.name)
    lines = []
    for entry in entries:
        is_last = entry == entries[-1]
        lines.append(f"{indent}{'└' if is_last else '├'}── {entry.name}")
        if entry.is_dir():
            lines += draw_tree(entry, indent + ("    " if is_last else "│   "))
    return lines


def test_the_tree_is_what_the_command_writes(tmp_path):
    folder = write_skeleton("my-store", tmp_path)
    assert "\n".join([folder.name, *draw_tree(folder)]) in GUIDE


def test_the_steps_name_what_the_skeleton_has(tmp_path):
    folder = write_skeleton("my-store", tmp_path)
    backend = (folder / "src" / "quark_my_store" / "backend.py").read_text()
    for name in ("_take_up", "_append", "_read_lines", "class MyStoreBackend"):
        assert name in GUIDE
        assert name in backend
    conformance = (folder / "tests" / "test_quark_my_store_conformance.py").read_text()
    assert "class TestMyStoreBackend(BackendConformance)" in conformance
    assert "-p quark_core.testing.report" in (folder / "README.md").read_text()


@pytest.mark.parametrize("fixture", re.findall(r"^\| `(\w+)` \| (?=.*)", GUIDE, re.MULTILINE))
def test_each_name_of_a_table_exists(fixture):
    known = {capability.name for capability in Capability}
    assert fixture in known or hasattr(BackendKit, fixture) or fixture == "write"


def test_every_capability_is_explained():
    explained = GUIDE.replace("`REMOVAL`", "")
    missing = [one.name for one in Capability if f"`{one.name}`" not in explained]
    assert missing == ["REMOVAL"]
