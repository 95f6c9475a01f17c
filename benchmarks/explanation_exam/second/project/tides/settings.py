"""What can be set, in a JSON file."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Shape:
    width: int = 24
    depth: int = 2
    drop: float = 0.0


@dataclass
class Optimizer:
    rate: float = 0.01
    decay: float = 0.0001
    batch: int = 32
    epochs: int = 10


@dataclass
class Settings:
    seed: int = 0
    tag: str = "ferry"
    report_every: int = 10
    delta: float = 1.0
    clean: bool = True
    shape: Shape = field(default_factory=Shape)
    optimizer: Optimizer = field(default_factory=Optimizer)


def load(path):
    values = json.loads(Path(path).read_text())
    shape = Shape(**values.pop("shape", {}))
    optimizer = Optimizer(**values.pop("optimizer", {}))
    return Settings(shape=shape, optimizer=optimizer, **values)
