"""What a scenario of the exam is: a training, what is drawn for it, and what is true of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from benchmarks.diagnosis.recorder import Recorder

RULES = (
    "exploding_gradients",
    "vanishing_gradients",
    "stagnant_layers",
    "activation_collapse",
    "overfitting_onset",
    "runtime_bottleneck_risk",
    "non_finite_values",
    "loss_spike",
    "divergence",
    "plateau",
    "update_ratio",
    "memory_growth",
    "mislabelled_data",
    "constant_inputs",
    "straggler_rank",
    "idle_device",
    "optimizer_not_stepping",
    "gradients_not_cleared",
    "training_mode_in_evaluation",
    "mostly_frozen",
    "replicas_differ",
    "parameters_not_optimized",
    "unshuffled_data",
    "squashed_outputs",
)
PHASES = (
    "initialization_adaptation",
    "rapid_learning",
    "stabilization",
    "stagnation",
    "overfitting_onset",
    "divergence",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is true of one run, judged after it by evidence of the scenario's own.

    The evidence is the model, the optimizer, the data, losses without noise or
    a twin without the fault; never what the analyzers say or where their
    thresholds lie.

    Attributes:
        kind: `unclear` where the evidence does not bear out what was intended
            (a fault without effect, a healthy run that went wrong): such a run
            is not scored.
        expected: Rules that must fire, all of them; empty for a fault that no
            rule is named for, which only must not be called healthy.
        tolerated: Rules that may fire as consequences, neither right nor wrong.
        culprits: Module names or metric keys, one of which an expected alert
            should name; empty where that is not judged.
        onset_step: Where the fault begins to act.
        phases_expected, phases_forbidden: Phases that must, and must not, occur.
        reason: Why, with figures.
    """

    kind: Literal["fault", "healthy", "unclear"]
    expected: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()
    onset_step: int | None = None
    phases_expected: tuple[str, ...] = ()
    phases_forbidden: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if unknown := {*self.expected, *self.tolerated} - {*RULES}:
            raise ValueError(f"there are no rules {sorted(unknown)}")
        if unknown := {*self.phases_expected, *self.phases_forbidden} - {*PHASES}:
            raise ValueError(f"there are no phases {sorted(unknown)}")
        if self.kind == "healthy" and self.expected:
            raise ValueError("a healthy run has no expected rule")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        made = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: list(got) if isinstance(got, tuple) else got for name, got in made.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Truth:
        """From what `to_dict` made."""
        return cls(
            **{
                entry.name: tuple(got) if isinstance(got := values[entry.name], list) else got
                for entry in fields(cls)
                if entry.name in values
            }
        )


@dataclass(slots=True)
class Draw:
    """Everything random of one run; the same name and seed draw the same.

    Attributes:
        name: Of the scenario.
        seed: Of the run, from 0.
        rng: For whatever the scenario draws.
        torch_seed: For `torch.manual_seed`.
        severity: Uniform in [0, 1]; how strong a fault is.
        onset: Uniform in [0, 1]; where a fault begins, see `onset_step`.
    """

    name: str
    seed: int
    rng: np.random.Generator = field(init=False)
    torch_seed: int = field(init=False)
    severity: float = field(init=False)
    onset: float = field(init=False)

    def __post_init__(self) -> None:
        self.rng = self.stream("draw")
        self.torch_seed = int(self.rng.integers(2**31))
        self.severity = float(self.rng.uniform())
        self.onset = float(self.rng.uniform())

    def stream(self, label: str) -> np.random.Generator:
        """A new generator at its beginning; the same label gives the same numbers.

        A twin of a training takes the same labels, and so has the same data
        and the same order of batches.
        """
        digest = hashlib.sha256(f"{self.name}|{self.seed}|{label}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))

    def again(self) -> Draw:
        """The same draw at its beginning, for a twin."""
        return Draw(self.name, self.seed)

    def uniform(self, low: float, high: float) -> float:
        """Drawn evenly between the two."""
        return float(self.rng.uniform(low, high))

    def log_uniform(self, low: float, high: float) -> float:
        """Drawn evenly on a logarithmic scale."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def integer(self, low: int, high: int) -> int:
        """A whole number of low, ..., high."""
        return int(self.rng.integers(low, high + 1))

    def choice(self, *options: Any) -> Any:
        """One of the options."""
        return options[int(self.rng.integers(len(options)))]

    def onset_step(self, steps: int, low: float = 0.25, high: float = 0.6) -> int:
        """The step at `onset` between these shares of the run."""
        return int(steps * (low + (high - low) * self.onset))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One way for a training to go wrong, or one healthy training with a trap.

    Attributes:
        name: Unique: family, rule or `healthy`, and a name, between slashes.
        kind: What is intended; what is true is in the Truth.
        train: Runs the whole training.
    """

    name: str
    kind: Literal["fault", "healthy"]
    train: Callable[[Recorder, Draw], Truth]
