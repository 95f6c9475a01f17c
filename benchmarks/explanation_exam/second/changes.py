"""What is changed between two runs of the second paper, and its project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.explanation_exam.changes import Change, Setup

__all__ = ["CHANGES", "NEUTRAL", "Sheet", "make_project", "take_project"]

_PROJECT = Path(__file__).with_name("project")
_COLUMNS = ("wind", "wave", "cars", "draught", "speed", "current")
_SCALES = np.array([9.0, 1.5, 120.0, 0.4, 14.0, 0.8])
_JOURNEYS, _HELD, _UNUSUAL_SHARE = 1_200, 500, 0.02
_SCRIPT = "-m tides"
_FILTERS = '''"""Filters for what sensors say."""

import numpy as np


def settle(values):
    return {body}
'''


@dataclass
class Sheet(Setup):
    """A run that is set in a JSON file; `options` are its values, with a dot where they nest."""

    script: str = _SCRIPT

    def make_command(self, seed: int) -> list[str]:
        """Writes the file; what the interpreter is started with."""
        values: dict[str, Any] = {"seed": seed}
        for name, value in self.options.items():
            *above, last = name.split(".")
            room = values
            for part in above:
                room = room.setdefault(part, {})
            room[last] = value
        (self.project / "tides.json").write_text(json.dumps(values, indent=2) + "\n")
        return self.script.split()


def take_project(folder: Path) -> Setup:
    """A project that has been made."""
    return Sheet(folder / "work")


def make_project(folder: Path) -> Setup:
    """A project that trains, in a new folder, with journeys and a library."""
    project = folder / "work"
    shutil.copytree(_PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "pyproject.toml").write_text('[project]\nname = "tides"\nversion = "3"\n')
    (project / "tables").mkdir()
    rng = np.random.default_rng(411)
    for part, count in (("journeys", _JOURNEYS), ("held", _HELD)):
        inputs = rng.normal(size=(count, len(_COLUMNS)))
        wind, wave, cars, draught, speed, current = inputs.T
        burnt = 4 * np.sin(2 * wind) + 3 * wave * cars + 2 * draught**2 + 3 * speed - 2 * current
        burnt = burnt + 8.0 + 0.8 * rng.normal(size=count)
        if part == "journeys":
            burnt[rng.random(count) < _UNUSUAL_SHARE] *= -200.0
        _write(project / "tables" / f"{part}.csv", np.column_stack([inputs * _SCALES + 20, burnt]))
    setup = Sheet(project)
    _install(setup, "sea_state", "0.4.1", {"seastate/filters.py": _FILTERS.format(body="values")})
    return setup


def _write(path: Path, rows: np.ndarray) -> None:
    lines = [",".join(f"{value:.6g}" for value in row) for row in rows]
    path.write_text("\n".join([",".join((*_COLUMNS, "burnt")), *lines]) + "\n")


def _read(path: Path) -> np.ndarray:
    return np.loadtxt(path, delimiter=",", skiprows=1)


def _install(setup: Setup, name: str, version: str, files: dict[str, str]) -> None:
    for old in setup.site.glob(f"{name}-*"):
        shutil.rmtree(old)
    notes = setup.site / f"{name}-{version}.dist-info"
    notes.mkdir(parents=True)
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (notes / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    (notes / "INSTALLER").write_text("pip\n")
    for path, text in files.items():
        (setup.site / path).parent.mkdir(exist_ok=True)
        (setup.site / path).write_text(text)
        (setup.site / path).parent.joinpath("__init__.py").touch()


def _set(**values: Any) -> Callable[[Setup], None]:
    """Options; two underscores are a dot."""
    options = {name.replace("__", "."): value for name, value in values.items()}
    return lambda setup: setup.options.update(options)


def _edit(name: str, before: str, after: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(f"tides/{name}", before, after)


def _export(name: str, value: str) -> Callable[[Setup], None]:
    return lambda setup: setup.variables.__setitem__(name, value)


def _alter(change: Callable[[np.ndarray], np.ndarray], part: str = "journeys") -> Any:
    def make(setup: Setup) -> None:
        path = setup.project / "tables" / f"{part}.csv"
        _write(path, change(_read(path)))

    return make


def _scale_column(rows: np.ndarray) -> np.ndarray:
    """The speed in other units, in one of the files."""
    rows[:, 4] *= 1.852
    return rows


def _format(setup: Setup) -> None:
    """As a formatter of other people has it."""
    ruff = Path(sys.executable).with_name("ruff")
    options = ["--isolated", "--line-length=48", "--config", "format.quote-style='single'"]
    subprocess.run(
        [ruff, "format", "--quiet", *options, setup.project / "tides"],
        check=True,
        capture_output=True,
    )


def _document(setup: Setup) -> None:
    setup.edit(
        "tides/training/loop.py",
        "    def step(self, inputs, targets):\n",
        '    def step(self, inputs, targets):\n        """One step of the optimizer."""\n',
    )
    setup.edit(
        "tides/data/scaling.py",
        "    def fit(self, values):\n",
        '    def fit(self, values):\n        """Of one part only."""\n        # As agreed.\n',
    )


def _reorder_imports(setup: Setup) -> None:
    setup.edit(
        "tides/training/loop.py",
        "from ..data import Scaler, Table\nfrom ..model import Network\n",
        "from ..model import Network\nfrom ..data import Table, Scaler\n",
    )
    setup.edit("tides/data/tables.py", "import csv\nimport os\n", "import os\nimport csv\n")


def _rename(setup: Setup) -> None:
    path = setup.project / "tides" / "training" / "losses.py"
    path.write_text(path.read_text().replace("sizes", "lengths").replace("rest", "left_over"))


def _add_function(setup: Setup) -> None:
    setup.edit(
        "tides/data/scaling.py",
        "    def undo(self, values):",
        "    def halve(self):\n        self.spread /= 2\n\n    def undo(self, values):",
    )


def _annotate(setup: Setup) -> None:
    setup.edit(
        "tides/training/averaging.py",
        "def mix(first, second, share):",
        "def mix(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:",
    )


def _add_module(setup: Setup) -> None:
    (setup.project / "tides" / "plots.py").write_text("def draw(curve):\n    print(curve)\n")


_BLOCKS, _LOOP = ("blocks.py",), ("loop.py",)

CHANGES: tuple[Change, ...] = (
    Change(
        "default",
        "code",
        _BLOCKS,
        _edit("model/blocks.py", "strength=0.7", "strength=9.0"),
        _SCRIPT,
    ),
    Change(
        "swapped",
        "code",
        ("scaling.py",),
        _edit("data/scaling.py", "self.middle, self.spread)", "self.spread, self.middle)"),
        _SCRIPT,
    ),
    Change(
        "dropped",
        "code",
        _LOOP,
        _edit("training/loop.py", "        self.optimizer.zero_grad()\n", ""),
        _SCRIPT,
    ),
    # Two calls below the method of the trainer.
    Change(
        "constant",
        "code",
        ("averaging.py",),
        _edit("training/averaging.py", "(1.0 - share)", "(1.02 - share)"),
        _SCRIPT,
    ),
    Change(
        "comparison",
        "code",
        ("tables.py",),
        _edit("data/tables.py", "> CALM", "< CALM"),
        _SCRIPT,
    ),
    Change(
        "activation",
        "code",
        _BLOCKS,
        _edit("model/blocks.py", "nn.functional.silu(", "nn.functional.hardshrink("),
        _SCRIPT,
    ),
    Change(
        "statistics",
        "code",
        ("scaling.py",),
        _edit("data/scaling.py", "values.std(axis=0)", "values.std()"),
        _SCRIPT,
    ),
    Change("truncated", "data", ("tables",), _alter(lambda rows: rows[:90]), _SCRIPT),
    Change(
        "sorted", "data", ("tables",), _alter(lambda rows: rows[np.argsort(rows[:, -1])]), _SCRIPT
    ),
    Change("column", "data", ("tables",), _alter(_scale_column, "held"), _SCRIPT),
    Change(
        "library",
        "package",
        ("sea-state", "sea_state", "seastate"),
        lambda setup: _install(
            setup,
            "sea_state",
            "0.4.2",
            {"seastate/filters.py": _FILTERS.format(body="np.clip(values, -0.6, 0.6)")},
        ),
        _SCRIPT,
    ),
    Change("dtype", "switch", ("dtype",), _export("TIDES_COARSE", "1"), _SCRIPT),
    Change("variable", "", (), _export("TIDES_POWER", "3"), _SCRIPT, recorded=False),
    Change(
        "together",
        "config",
        ("width", "depth"),
        _set(shape__width=3, shape__depth=1),
        _SCRIPT,
    ),
    Change("rate", "config", ("rate",), _set(optimizer__rate=0.001), _SCRIPT),
    Change("clean", "config", ("clean",), _set(clean=False), _SCRIPT),
)
"""Changes that change what comes out."""

NEUTRAL: tuple[Change, ...] = (
    Change("formatted", "code", (".py",), _format, _SCRIPT),
    Change("documented", "code", (".py",), _document, _SCRIPT),
    Change("imports", "code", (".py",), _reorder_imports, _SCRIPT),
    Change("renamed", "code", (".py",), _rename, _SCRIPT),
    Change("uncalled", "code", (".py",), _add_function, _SCRIPT),
    Change("annotated", "code", (".py",), _annotate, _SCRIPT),
    Change("module", "code", (".py",), _add_module, _SCRIPT),
    Change("tag", "config", ("tag",), _set(tag="storm"), _SCRIPT),
    Change("report", "config", ("report_every",), _set(report_every=20), _SCRIPT),
    Change(
        "unused",
        "package",
        ("tide",),
        lambda setup: _install(setup, "tide_tables", "1.1", {}),
        _SCRIPT,
    ),
    # The order of the rows is what a seed is.
    Change(
        "shuffled",
        "data",
        ("tables",),
        _alter(lambda rows: np.random.default_rng(3).permutation(rows)),
        _SCRIPT,
    ),
    Change("threads", "switch", ("threads",), _export("OMP_NUM_THREADS", "2"), _SCRIPT),
)
"""Changes that change nothing that comes out, or no more than a seed does."""
