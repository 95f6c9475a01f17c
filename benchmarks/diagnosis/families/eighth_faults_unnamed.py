"""Faults that no rule is named for: they only must not be called healthy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.eighth_course import Course, fit, judge_fault, pair
from benchmarks.diagnosis.families.eighth_tasks import cut, make_images, sample, supervise
from benchmarks.diagnosis.measuring import WRECK
from benchmarks.diagnosis.networks import make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth

# What may be said of a model that ignores its input, or is judged by other data.
_BESIDE = (*WRECK, "overfitting_onset", "constant_inputs", "training_mode_in_evaluation")


class _Variational(nn.Module):
    """Digits by way of a Gaussian code."""

    def __init__(self, width: int, code: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.mean, self.spread = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image again, and the divergence of each code from the prior."""
        found = self.encoder(x)
        mean, log_variance = self.mean(found), self.spread(found).clamp(-8, 4)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        again = self.decoder(mean + noise * (0.5 * log_variance).exp())
        apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return again, apart


def _kl_summed_error_averaged(recorder: Recorder, draw: Draw) -> Truth:
    """Bowman et al. 2016, by the usual slip: the error is averaged, the divergence summed."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(draw.stream("data")).flatten()
        model = _Variational(draw.integer(48, 80), 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        take = sample(draw, len(data.x), 48)

        def parts(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
            again, apart = net(x)
            error = (again - x).square()
            return (error.mean() if faulty else 10 * error.sum(1).mean()), apart.mean()

        def lose(net: nn.Module, x: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
            error, apart = parts(net, x)
            return error + apart, {"train/recon": error.item(), "train/kl": apart.item()}

        def check(_step: int) -> dict[str, float]:
            model.eval()
            with torch.no_grad():
                error, apart = parts(model, data.val_x)
            model.train()
            return {
                "val/loss": float(error + apart),
                "val/recon": float(error),
                "val/kl": float(apart),
            }

        def proof(net: nn.Module) -> float:
            return float(functional.mse_loss(net(data.proof_x)[0], data.proof_x))

        return Course(
            model, optimizer, lambda step: data.x[take(step)], lose, proof, check, steps=400
        )

    course, notes, twin = pair(make, recorder, draw)
    with torch.no_grad():
        apart = float(course.model(course.batch(0))[1].mean())
    return judge_fault(
        apart < 0.1 and notes.end > 1.5 * twin.end,
        notes,
        twin,
        reason=f"the posterior is the prior: divergence {apart:.3g}",
        tolerated=_BESIDE,
    )


def _ring(rng: np.random.Generator, count: int) -> Tensor:
    angle = 2 * np.pi * rng.integers(0, 8, count) / 8
    points = 2 * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.05 * rng.normal(size=(count, 2))
    return torch.tensor(points, dtype=torch.float32)


def _count_modes(points: Tensor) -> int:
    angle = torch.arange(8) * torch.pi / 4
    centres = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    apart, nearest = torch.cdist(points, centres).min(1)
    return int((torch.bincount(nearest[apart < 0.3], minlength=8) >= len(points) // 100).sum())


def _one_mode(recorder: Recorder, draw: Draw) -> Truth:
    """Metz et al. 2017: a GAN on a ring of eight Gaussians whose generator sits on one or two."""
    rng = draw.stream("ring")
    torch.manual_seed(draw.torch_seed)
    model = nn.ModuleDict(
        {
            "generator": make_mlp([8, 48, 48, 2], activation="relu"),
            "critic": make_mlp([2, 48, 48, 1], activation="relu"),
        }
    )
    generator, critic = model["generator"], model["critic"]
    makers = torch.optim.Adam(generator.parameters(), lr=draw.uniform(4e-3, 6e-3))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3)
    entropy = functional.binary_cross_entropy_with_logits

    def lose(_net: nn.Module, real: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
        made = generator(torch.randn(len(real), 8))
        yes, no = critic(real), critic(made.detach())
        judged = entropy(yes, torch.ones_like(yes)) + entropy(no, torch.zeros_like(no))
        judges.zero_grad()
        judged.backward()
        judges.step()
        fooled = critic(made)
        loss = entropy(fooled, torch.ones_like(fooled))
        generator.zero_grad()
        return loss, {
            "loss/D": judged.item(),
            "D/real": yes.sigmoid().mean().item(),
            "D/fake": no.sigmoid().mean().item(),
        }

    def modes(net: Any) -> int:
        return _count_modes(net["generator"](torch.randn(800, 8)))

    def check(_step: int) -> dict[str, float]:
        with torch.no_grad():
            return {"eval/modes_covered": modes(model)}

    course = Course(
        model,
        [makers, judges],
        lambda _step: _ring(rng, 64),
        lose,
        lambda net: 8.0 - modes(net),
        check,
        steps=500,
        key="loss/G",
        update=lambda _step: makers.step(),
    )
    notes = fit(course, recorder)
    found = [8 - int(value) for value in notes.proof[-10:]]
    return judge_fault(
        max(found) <= 3,
        notes,
        None,
        reason=f"the generator covers {min(found)} to {max(found)} of 8 modes",
        tolerated=_BESIDE,
    )


def _nobody_is_ill(recorder: Recorder, draw: Draw) -> Truth:
    """He and Garcia 2009: two per cent of positives, and a model that never says yes."""
    kept: list[Any] = []

    def make(draw: Draw, faulty: bool) -> Course:
        rng = draw.stream("patients")
        x = rng.normal(size=(3000, 12))
        risk = x[:, 0] + x[:, 1] + 0.7 * np.abs(x[:, 2])
        ill = (risk > np.quantile(risk, 0.975)).astype(np.int64)
        ill = np.where(rng.uniform(size=3000) < 0.004, 1 - ill, ill)
        data = cut(x, ill, 2)
        model = make_mlp([12, 24, 2], activation="relu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        weight = torch.tensor([1.0, 1.0 if faulty else 25.0])
        course = supervise(draw, model, optimizer, data, size=64, steps=300)

        def lose(net: nn.Module, got: Any, _step: int) -> tuple[Tensor, dict[str, float]]:
            return functional.cross_entropy(net(got[0]), got[1], weight), {}

        def recall(net: nn.Module, x: Tensor, y: Tensor) -> float:
            return float((net(x).argmax(1)[y == 1] == 1).float().mean())

        plain = course.check

        def check(step: int) -> dict[str, float]:
            assert plain is not None
            values = plain(step)
            with torch.no_grad():
                values["val/recall"] = recall(model, data.val_x, data.val_y)
            return values

        course.lose, course.check = lose, check
        course.proof = lambda net: 1 - recall(net, data.proof_x, data.proof_y)
        kept.append(course)
        return course

    _, notes, twin = pair(make, recorder, draw)
    return judge_fault(
        notes.end > 0.95 and twin.end < 0.5,
        notes,
        twin,
        reason=f"no case is found (recall {1 - notes.end:.2f}), with weights {1 - twin.end:.2f}",
        tolerated=_BESIDE,
    )


def _validated_on_raw_pixels(recorder: Recorder, draw: Draw) -> Truth:
    """Threads: images are normalised for training and left as bytes for validation."""

    def make(draw: Draw, faulty: bool) -> Course:
        data = make_images(draw, classes=6)
        model = make_convolutional([8, 16], 12, 6)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        course = supervise(draw, model, optimizer, data, steps=260, check_every=20)
        raw = 127.0 + 50.0 * data.val_x if faulty else data.val_x

        def check(_step: int) -> dict[str, float]:
            model.eval()
            with torch.no_grad():
                output = model(raw)
            model.train()
            return {
                "val/loss": float(functional.cross_entropy(output, data.val_y)),
                "val/accuracy": float((output.argmax(1) == data.val_y).float().mean()),
            }

        course.check = check
        return course

    course, notes, twin = pair(make, recorder, draw)
    assert course.check is not None
    told = course.check(0)
    return judge_fault(
        told["val/accuracy"] < 0.6 and told["val/loss"] > 5 * notes.end,
        notes,
        twin,
        reason=f"validation of other inputs: accuracy {told['val/accuracy']:.2f} is told",
        tolerated=_BESIDE,
    )


SCENARIOS = tuple(
    Scenario(name=f"eighth/{name}", kind="fault", train=train)
    for name, train in {
        "none/kl_summed_error_averaged": _kl_summed_error_averaged,
        "none/one_mode": _one_mode,
        "none/nobody_is_ill": _nobody_is_ill,
        "none/validated_on_raw_pixels": _validated_on_raw_pixels,
    }.items()
)
