"""The exam of the normal form: two foreign projects, rewritten by others and edited."""

from __future__ import annotations

import ast
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import cosmetic_variants
import logic_edits
import networkx
import pytest
import sqlalchemy

from quark.provenance.normal_form import LEVEL_SYNTAX, digest_source

_FORMATS = {
    "narrow, single quotes": [
        "format",
        "--config",
        "line-length=60",
        "--config",
        "format.quote-style='single'",
    ],
    "wide, tabs": [
        "format",
        "--config",
        "line-length=140",
        "--config",
        "format.indent-style='tab'",
        "--config",
        "format.skip-magic-trailing-comma=true",
    ],
    "imports sorted": [
        "check",
        "--select",
        "I",
        "--fix",
        "--config",
        "lint.isort.force-sort-within-sections=true",
        "--config",
        "lint.isort.force-single-line=true",
    ],
}
_REWRITTEN = {"comments", "parentheses", "layout"}


def _list_files(largest_bytes: int) -> list[Path]:
    files = []
    for project in (networkx, sqlalchemy):
        root = Path(project.__file__ or "").parent
        files += [path for path in sorted(root.rglob("*.py")) if "tests" not in path.parts]
    return [path for path in files if 0 < path.stat().st_size < largest_bytes]


def _name(path: Path) -> str:
    return "_".join(path.parts[path.parts.index("site-packages") + 1 :])


def _check_variants(files: list[Path], folder: Path) -> Counter[str]:
    """Nothing changes; how many of each kind differ from what they are variants of."""
    different: Counter[str] = Counter()
    changed = []
    for path in files:
        source = path.read_text("utf-8")
        digest = digest_source(source)
        assert digest[1] == LEVEL_SYNTAX
        plain = ast.unparse(ast.parse(source))
        for kind, vary in cosmetic_variants.VARIANTS.items():
            variant = vary(source, random.Random(f"{path.name} {kind}"))
            if variant == (source if kind in _REWRITTEN else plain):
                continue
            different[kind] += 1
            if digest_source(variant) != digest:
                changed.append((kind, path.name))
    for kind, options in _FORMATS.items():
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        for path in files:
            shutil.copyfile(path, place / _name(path))
        cosmetic_variants.format_all(place, options)
        for path in files:
            variant_bytes = (place / _name(path)).read_bytes()
            if variant_bytes == path.read_bytes():
                continue
            if kind == "imports sorted" and b"import *" in variant_bytes:
                # Whoever moves a star moves what it hides.
                continue
            different[kind] += 1
            if digest_source(variant_bytes) != digest_source(path.read_bytes()):
                changed.append((kind, path.name))
    assert changed == []
    return different


def _check_edits(files: list[Path], times: int, seed: int) -> Counter[str]:
    """No edit is missed; how many there were of each kind."""
    choose = random.Random(seed)
    made: Counter[str] = Counter()
    missed = []
    known: dict[Path, tuple[str, str, str]] = {}
    while made.total() < times:
        path = choose.choice(files)
        if path not in known:
            source = path.read_text("utf-8")
            known[path] = (source, ast.unparse(ast.parse(source)), digest_source(source)[0])
        source, plain, digest = known[path]
        kind = choose.choice(list(logic_edits.EDITS))
        edited = logic_edits.edit(source, kind, choose)
        if edited is None or edited == plain:
            continue
        made[kind] += 1
        if digest_source(edited)[0] == digest:
            missed.append((kind, path.name, edited))
    assert missed == []
    assert set(made) == set(logic_edits.EDITS)
    return made


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.long
def test_what_others_rewrite_stays_what_it_was_and_what_they_edit_does_not(tmp_path):
    files = _list_files(12_000)
    different = _check_variants(files[::5], tmp_path)
    assert different.total() >= 400, different
    assert _check_edits(files, 500, seed=1).total() == 500


# Each in four parts, so that none takes minutes.
@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_variants_change_nothing(tmp_path, part):
    different = _check_variants(_list_files(80_000)[part::4], tmp_path)
    assert different.total() >= 500, different


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_edits_are_all_seen(part):
    made = _check_edits(_list_files(80_000), 625, seed=2 + part)
    assert made.total() == 625
