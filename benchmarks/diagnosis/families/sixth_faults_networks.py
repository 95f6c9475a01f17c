"""Networks with a mistake in them: what is frozen, dead, collapsed, cut off, started wrongly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.datasets import Data
from benchmarks.diagnosis.families.seventh_course import FALLOUT, Log, Plan, deal, fault
from benchmarks.diagnosis.families.seventh_tasks import learn
from benchmarks.diagnosis.families.sixth_tasks import Variational, digits, friedman, images, letters
from benchmarks.diagnosis.scenario import Draw


def _dark_images(draw: Draw, broken: bool) -> Plan:
    """Bytes are divided by 256 as whole numbers: every image is black."""
    data = datasets.load_digits(draw.stream("data"))
    if broken:
        parts = {
            name: ((getattr(data, name) * 255).long() // 256).float()
            for name in ("x", "val_x", "proof_x")
        }
        data = replace(data, **parts)
    return digits(draw, data=data, steps=200)


def _raw_columns(draw: Draw, broken: bool) -> Plan:
    """Columns in their own units, up to thousands, into tanh."""
    data = datasets.load_table("breast_cancer", draw.stream("data"), scale=not broken)
    width = draw.integer(24, 40)

    def build() -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                first=nn.Linear(30, width),
                act1=nn.Tanh(),
                second=nn.Linear(width, width),
                act2=nn.Tanh(),
                head=nn.Linear(width, 2),
            )
        )

    return learn(
        draw,
        data,
        build,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        steps=200,
    )


def _left_frozen(draw: Draw, broken: bool) -> Plan:
    """Lines of the fine-tuning script were kept where there is nothing trained before."""

    def arrange(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        if broken:
            for part in (model.body, model.neck):
                part.requires_grad_(False)

    return images(draw, arrange=arrange, steps=240)


def _detached(draw: Draw, broken: bool) -> Plan:
    """Features go through `.detach()`, as they did in a probe of them."""

    class Cut(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            features = self.body(x)
            return self.head(self.neck(features.detach() if broken else features))

    width = draw.integer(6, 10)

    def build() -> nn.Module:
        body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        neck = nn.Sequential(nn.Linear(width, 24), nn.ReLU())
        return Cut(OrderedDict(body=body, neck=neck, head=nn.Linear(24, 4)))

    return images(
        draw,
        build=build,
        steps=240,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=6e-3),
    )


def _killed_by_the_first_steps(draw: Draw, broken: bool) -> Plan:
    """A warm-up the wrong way round: the first steps have hundreds of times the rate."""
    factor = draw.uniform(150.0, 300.0)

    def rate(step: int) -> float:
        return factor if broken and step < 4 else 1.0

    return friedman(
        draw,
        steps=220,
        rate=rate,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=4e-3),
    )


def _is_dead(log: Log, _twin: Log) -> str | None:
    """Whether most units of a ReLU of the trained model never fire on inputs like the data's."""
    with torch.no_grad():
        x = torch.rand(512, 10)
        first = log.model.first(x).relu()
        second = log.model.second(first).relu()
    shares = [float((part.amax(0) <= 0).double().mean()) for part in (first, second)]
    return None if max(shares) > 0.8 else f"of the ReLUs {max(shares):.0%} are out"


def _collapsed_posterior(draw: Draw, broken: bool) -> Plan:
    """The divergence is summed over the code and the error is a mean over pixels."""
    return _variational(draw, 1.0 if broken else 1.0 / 256)


def _variational(draw: Draw, weight: float) -> Plan:
    data = datasets.load_digits(draw.stream("data")).flatten()
    data = Data(data.x, data.x, data.val_x, data.val_x, data.proof_x, data.proof_x, classes=0)

    def lose(model: nn.Module, x: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        again, divergence = model(x)
        error, rate = functional.mse_loss(again, x), weight * divergence.mean()
        return error + rate, {
            "train/error": float(error.detach()),
            "train/kl": float(divergence.detach().mean()),
        }

    return Plan(
        build=lambda: Variational(64, 64, 8),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        batch=deal(data, 48, draw.stream("order")),
        loss=lambda model, batch, _step: lose(model, batch[0]),
        proof=lambda model: float(functional.mse_loss(model(data.proof_x)[0], data.proof_x)),
        val=lambda model: {"val/loss": float(lose(model, data.val_x)[0])},
        steps=260,
    )


def _untied(draw: Draw, broken: bool) -> Plan:
    """The head's weight, tied to the embedding's, is copied after the optimizer was made."""

    def arrange(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        if broken:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())

    return letters(draw, tied=True, arrange=arrange, steps=240)


class _Half(nn.Module):
    """Attention over rows of an image whose softmax is taken by hand, in half precision."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 16) for _ in range(3))
        self.head = nn.Linear(16 * 8, 10)
        self.safe = safe

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        rows = x.flatten(1).unflatten(1, (8, 8))
        scores = self.query(rows) @ self.key(rows).transpose(1, 2)
        if self.safe:
            weights = scores.softmax(-1)
        else:
            powers = scores.half().exp().float()
            weights = powers / powers.sum(-1, keepdim=True)
        return self.head((weights @ self.value(rows)).flatten(1))


def _half_overflow(draw: Draw, broken: bool) -> Plan:
    """Exp of a score above 11 is infinite in half precision; scores grow while it trains."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    for part in (data.x, data.val_x, data.proof_x):
        part.mul_(2.0)
    return digits(
        draw,
        data=data,
        build=lambda: _Half(not broken),
        steps=240,
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=8e-3),
    )


def _is_stuck(log: Log, _twin: Log) -> str | None:
    names = [name for name, _ in log.model.named_parameters() if name.startswith("body")]
    now = dict(log.model.named_parameters())
    moved = any(not torch.equal(now[name], log.begun[name]) for name in names)
    return "the body moved" if moved else None


_FROZEN = (*FALLOUT, "parameters_not_optimized", "mostly_frozen")

# Since the first sight the layers whose outputs saturate or die are right, too, as culprits.
SCENARIOS = (
    fault("sixth/dark_images", _dark_images, "constant_inputs"),
    fault(
        "sixth/raw_columns",
        _raw_columns,
        "activation_collapse",
        culprits=("act1", "act2", "first", "second"),
        share=0.1,
    ),
    fault("sixth/left_frozen", _left_frozen, "mostly_frozen", tolerated=_FROZEN, share=0.15),
    fault(
        "sixth/detached",
        _detached,
        "stagnant_layers",
        tolerated=_FROZEN,
        share=0.15,
        check=_is_stuck,
    ),
    fault(
        "sixth/killed_by_first_steps",
        _killed_by_the_first_steps,
        "activation_collapse",
        culprits=("act1", "act2", "first", "second"),
        check=_is_dead,
    ),
    fault("sixth/collapsed_posterior", _collapsed_posterior, share=0.1),
    fault(
        "sixth/untied_head",
        _untied,
        "parameters_not_optimized",
        tolerated=_FROZEN,
        culprits=("head",),
        share=0.05,
    ),
    fault(
        "sixth/half_precision_overflow",
        _half_overflow,
        "non_finite_values",
        tolerated=(*FALLOUT, "optimizer_not_stepping"),
    ),
)
