"""What is changed between two runs of the exam, of each kind that the design names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CHANGES", "NEUTRAL", "Change", "Setup", "make_project"]

_PROJECT = Path(__file__).with_name("project")
_CLASSES, _WIDTH, _PART_SAMPLES = 4, 8, 400
_LIBRARY = '''"""Puts numbers on a grid, as a colleague's library does."""

import numpy as np

__version__ = "{version}"


def settle(values):
    return {body}
'''


@dataclass
class Setup:
    """How one run is started.

    Attributes:
        project: Folder of its code and data.
        script: The script in there.
        options: Option of the command line -> value.
        variables: Environment variables.
    """

    project: Path
    script: str = "train.py"
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        """Where its libraries are installed."""
        return self.project.parent / "env" / "lib" / "site-packages"

    def make_command(self, seed: int) -> list[str]:
        """What the interpreter is started with."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        return [self.script, *options, f"--seed={seed}"]

    def edit(self, name: str, before: str, after: str) -> None:
        """Change a file; what is to be replaced must be there once."""
        path = self.project / name
        text = path.read_text()
        if text.count(before) != 1:
            raise ValueError(f"{name} has {before!r} {text.count(before)} times")
        path.write_text(text.replace(before, after))


@dataclass(frozen=True)
class Change:
    """One thing that is done between two runs.

    Attributes:
        name: It.
        kind: What an explanation must call it.
        places: Words of which one must be in the place that is named.
        make: Does it.
        script: The script that it is for.
        recorded: Whether a run records it. What none does nobody can name: then the right answer
            names nobody as probable, and says that there is something unknown.
    """

    name: str
    kind: str
    places: tuple[str, ...]
    make: Callable[[Setup], None]
    script: str = "train.py"
    recorded: bool = True


def make_project(folder: Path) -> Setup:
    """A project that trains, in a new folder, with data and a library."""
    project = folder / "work"
    shutil.copytree(_PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "pyproject.toml").write_text('[project]\nname = "exam"\nversion = "1"\n')
    rng = np.random.default_rng(20_260)
    (project / "samples").mkdir()
    centres = rng.normal(size=(_CLASSES, _WIDTH)) * 1.1
    for name in ("train-0", "train-1", "train-2", "held"):
        labels = rng.integers(0, _CLASSES, _PART_SAMPLES)
        inputs = centres[labels] + 1.2 * rng.normal(size=(_PART_SAMPLES, _WIDTH))
        np.savez(project / "samples" / f"{name}.npz", inputs=inputs, labels=labels)
    setup = Setup(project)
    _install(setup, "1.0.0", "values")
    return setup


def _install(setup: Setup, version: str, body: str) -> None:
    for old in setup.site.glob("roundings*"):
        shutil.rmtree(old)
    package = setup.site / "roundings"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_LIBRARY.format(version=version, body=body))
    notes = setup.site / f"roundings-{version}.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: roundings\nVersion: {version}\n")
    (notes / "RECORD").write_text("roundings/__init__.py,,\n")
    (notes / "top_level.txt").write_text("roundings\n")
    (notes / "INSTALLER").write_text("pip\n")


def _set(option: str, value: str) -> Callable[[Setup], None]:
    return lambda setup: setup.options.__setitem__(option, value)


def _edit(name: str, before: str, after: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(name, before, after)


def _rewrite(setup: Setup, change: Callable[..., None]) -> None:
    paths = sorted((setup.project / "samples").glob("train-*.npz"))
    parts = [dict(np.load(path)) for path in paths]
    change(parts)
    for path, part in zip(paths, parts, strict=True):
        np.savez(path, **part)


def _sort_samples(setup: Setup) -> None:
    """The same samples, those of one class after those of another."""

    def change(parts: list[dict[str, np.ndarray]]) -> None:
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(whole["labels"], kind="stable")
        for number, part in enumerate(parts):
            chosen = order[number * _PART_SAMPLES : (number + 1) * _PART_SAMPLES]
            part.update({name: values[chosen] for name, values in whole.items()})

    _rewrite(setup, change)


def _alter_labels(setup: Setup) -> None:
    """One file with the labels of another class."""
    _rewrite(setup, lambda parts: parts[1].update(labels=(parts[1]["labels"] + 1) % _CLASSES))


def _alter_inputs(setup: Setup) -> None:
    """One file with inputs in another unit."""
    _rewrite(setup, lambda parts: parts[2].update(inputs=parts[2]["inputs"] * -3.0))


def _comment(setup: Setup) -> None:
    setup.edit("optim.py", "LONGEST = 5.0", "# Found by trying.\nLONGEST = 5.0  # as in the paper")
    setup.edit("model.py", '"""A small network of one hidden layer."""', '"""A network."""')


def _rename_local(setup: Setup) -> None:
    path = setup.project / "model.py"
    text = path.read_text()
    path.write_text(text.replace("shifted", "lowered").replace("logs", "log_shares"))


CHANGES: tuple[Change, ...] = (
    Change("lr", "config", ("lr",), _set("--lr", "0.003")),
    Change("hidden", "config", ("hidden",), _set("--hidden", "1")),
    Change("noise", "config", ("noise",), _set("--noise", "6.0")),
    Change("weight_decay", "config", ("weight_decay",), _set("--weight-decay", "2.0")),
    Change("batch_size", "config", ("batch_size",), _set("--batch-size", "400")),
    Change(
        "scale",
        "code",
        ("model.py", "find_gradients"),
        _edit("model.py", "shares /= len(labels)", "shares /= 40 * len(labels)"),
    ),
    Change(
        "momentum", "code", ("optim.py", "step"), _edit("optim.py", "share = 0.9", "share = -0.7")
    ),
    Change(
        "warm_up",
        "code",
        ("schedule.py", "find_rate"),
        _edit("schedule.py", "return lr * (1.0 - 0.9", "return lr * 0.01 * (1.0 - 0.9"),
    ),
    # Called by the step of the optimizer, which the traced function calls.
    Change(
        "clip", "code", ("optim.py", "clip"), _edit("optim.py", "LONGEST = 5.0", "LONGEST = 0.02")
    ),
    Change(
        "normalise",
        "code",
        ("data.py", "normalise"),
        _edit("data.py", "inputs / 4.0", "inputs / 90.0"),
    ),
    Change("sorted", "data", ("samples", "train"), _sort_samples),
    Change("labels", "data", ("samples", "train"), _alter_labels),
    Change("inputs", "data", ("samples", "train"), _alter_inputs),
    Change(
        "library",
        "package",
        ("roundings",),
        lambda setup: _install(setup, "2.0.0", "np.round(values, 0)"),
    ),
    Change(
        "dtype",
        "switch",
        ("dtype",),
        lambda setup: setup.variables.__setitem__("COARSE", "1"),
        "train_torch.py",
    ),
    Change("lr_torch", "config", ("lr",), _set("--lr", "0.001"), "train_torch.py"),
)
"""Changes that change what comes out."""

NEUTRAL: tuple[Change, ...] = (
    Change("comment", "code", ("optim.py", "model.py"), _comment),
    Change("renamed_local", "code", ("model.py",), _rename_local),
    Change("log_every", "config", ("log_every",), _set("--log-every", "7")),
    Change("title", "config", ("title",), _set("--title", "fancy")),
    Change(
        "unused_library",
        "package",
        ("unused",),
        lambda setup: _install_unused(setup),
    ),
    Change("nothing", "", (), lambda _setup: None),
)
"""Changes that change nothing that comes out."""


def _install_unused(setup: Setup) -> None:
    notes = setup.site / "unused-3.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: unused\nVersion: 3.0\n")
    (notes / "RECORD").write_text("unused/__init__.py,,\n")
