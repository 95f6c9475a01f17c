"""Faults of the fourth family as they are told of: each names where."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.fourth_course import Course, both, broken, given_away, train
from benchmarks.diagnosis.families.fourth_tasks import Batches, draw_ring, supervise
from benchmarks.diagnosis.measuring import WRECK
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _plain(made: Draw, **options: object) -> Course:
    data = datasets.load_blobs(made.stream("data"))
    width = made.integer(16, 40)
    model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    return supervise(made, model, data, optimizer, **options)


def checkpoints_cost_half(recorder: Recorder, draw: Draw) -> Truth:
    """DeepChem issue 458: "it spends more time saving checkpoints than it does computing"."""
    rng = draw.stream("times")
    every = draw.integer(8, 15)
    compute, share = draw.log_uniform(10, 80), 0.7 + 0.5 * draw.severity

    def times(step: int) -> dict[str, float]:
        busy = compute * float(np.exp(rng.normal(0, 0.04)))
        saving = share * every * compute if step % every == every - 1 else 0.0
        data = 0.04 * compute
        return {"step_ms": busy + data + saving, "data_ms": data, "compute_ms": busy}

    course = _plain(draw, times=times, start={"timing": "manual"})
    train(course, recorder, draw)
    return broken(
        True,
        f"every {every}th step saves for {share * every:.1f} steps' time: "
        f"{share / (1 + share):.0%} of the whole",
        expected=("runtime_bottleneck_risk",),
        onset_step=0,
    )


def adamw_at_a_tenth(recorder: Recorder, draw: Draw) -> Truth:
    """Karpathy: "3e-4 is the best learning rate for Adam"; threads have 0.1, and decay of 0.3."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.2).flatten()
        width = made.integer(48, 80)
        model = nn.Sequential()
        for place, inputs in enumerate((64, width)):
            model.add_module(f"fc{place}", nn.Linear(inputs, width))
            model.add_module(f"norm{place}", nn.LayerNorm(width))
            model.add_module(f"act{place}", nn.GELU())
        model.add_module("head", nn.Linear(width, 10))
        rate = 0.15 + 0.15 * made.severity if faulty else 0.002
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.3)
        return supervise(made, model, data, optimizer, steps=240)

    _, notes, twin = both(make, recorder, draw)
    names = ("fc0.weight", "fc1.weight", "head.weight")
    ratios = [float(np.median(notes.ratios[name])) for name in names]
    usual = [float(np.median(twin.ratios[name])) for name in names]
    return broken(
        min(ratios[:2]) > 0.04 and notes.end > 2 * twin.end,
        f"in the median step updates are {ratios[0]:.2g}, {ratios[1]:.2g}, {ratios[2]:.2g} of the "
        f"weights (twin {usual[0]:.2g}, {usual[1]:.2g}, {usual[2]:.2g}); proof {notes.end:.3g} "
        f"against {twin.end:.3g}",
        expected=("update_ratio",),
        tolerated=tuple(rule for rule in WRECK if rule != "update_ratio"),
        onset_step=0,
    )


def deep_plain_network(recorder: Recorder, draw: Draw) -> Truth:
    """He et al. 2015: a deep network without skips and scaled start does not begin to learn."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.1).flatten()
        depth = made.integer(14, 18)
        depth = depth if faulty else 4
        layers: list[nn.Module] = []
        for place in range(depth):
            linear = nn.Linear(64 if place == 0 else 40, 40)
            if not faulty:
                nn.init.orthogonal_(linear.weight, 2**0.5)
            layers += [linear] if faulty else [linear, nn.LayerNorm(40)]
            layers.append(nn.ReLU())
        model = nn.Sequential(*layers, nn.Linear(40, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return supervise(made, model, data, optimizer, steps=240)

    course, notes, twin = both(make, recorder, draw)
    names = [name for name, p in course.model.named_parameters() if p.dim() == 2]
    share = float(np.median(np.array(notes.rms[names[0]]) / np.array(notes.rms[names[-1]])))
    lowest = names[: len(names) // 3]
    return broken(
        share < 1e-3 and given_away(notes, twin) > 0.7,
        f"gradient of the first layer is {share:.3g} of the last's; proof {notes.end:.4g} against "
        f"{twin.end:.4g} of a twin of four layers with norms",
        expected=("vanishing_gradients",),
        tolerated=("stagnant_layers", "plateau", "activation_collapse", "update_ratio"),
        culprits=tuple(name.removesuffix(".weight") for name in lowest),
        onset_step=0,
    )


def judge_too_strong(recorder: Recorder, draw: Draw) -> Truth:
    """Arjovsky and Bottou 2017: against a perfect judge the minimax generator has no gradient."""

    def make(made: Draw, faulty: bool) -> Course:
        rng = made.stream("data")
        points, kept = draw_ring(rng, 2000), draw_ring(rng, 256)
        maker = nn.Sequential(
            nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )
        # Far from the data, as generators begin in many dimensions.
        with torch.no_grad():
            maker[4].bias.add_(6.0)
        judge = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, 1),
        )  # fmt: skip
        optimizer = torch.optim.Adam(maker.parameters(), lr=0.001)
        rounds = made.integer(3, 5) if faulty else 1
        judge_rate = 0.01 if faulty else 0.001
        other = torch.optim.Adam(judge.parameters(), lr=judge_rate)
        batches = Batches(made, points, points, 64)
        seen = {"judge": 0.0}

        def take(_step: int) -> Tensor:
            for _ in range(rounds):
                real, _ = batches.take()
                with torch.no_grad():
                    fake = maker(torch.randn(64, 4))
                judged = functional.softplus(-judge(real)) + functional.softplus(judge(fake))
                other.zero_grad()
                judged.mean().backward()
                other.step()
                seen["judge"] = float(judged.detach().mean())
            verdict = judge(maker(torch.randn(64, 4)))
            # log(1 - D(G(z))): with the minimax loss the gradient dies with the verdict.
            minimax = -functional.softplus(verdict).mean()
            return minimax if faulty else functional.softplus(-verdict).mean()

        def distance(model: nn.Module) -> float:
            fake = model(torch.randn(256, 4))
            apart = torch.cdist(fake, kept).mean() * 2
            return float(apart - torch.cdist(fake, fake).mean() - torch.cdist(kept, kept).mean())

        return Course(
            model=maker,
            optimizer=optimizer,
            loss=take,
            proof=distance,
            loss_key="generator/loss",
            extra=lambda: {"discriminator/loss": seen["judge"]},
            steps=200,
        )

    _, notes, twin = both(make, recorder, draw)
    norms = np.array(notes.gradients)
    first, end = float(np.median(norms[:3])), float(np.median(norms[-60:]))
    return broken(
        end < 3e-3 * first and given_away(notes, twin) > 0.5,
        f"gradient norm of the generator {first:.3g} -> {end:.3g}; distance {notes.proof[0]:.3g} "
        f"-> {notes.end:.3g} against {twin.end:.3g}",
        expected=("vanishing_gradients",),
        tolerated=("stagnant_layers", "plateau", "activation_collapse", "update_ratio"),
        onset_step=int(np.argmax(norms < 0.01 * first)),
    )


class _Scaled(nn.Module):
    """Blocks whose output is scaled by a number that somebody forgot to make a parameter."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int, faulty: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Linear(2 * width, width))
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, outputs)
        scales = torch.zeros(depth)
        if faulty:
            self.register_buffer("scales", scales)
        else:
            self.scales = nn.Parameter(scales)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers or logits."""
        x = self.entry(x)
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return self.head(x)


def scale_not_a_parameter(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch forum: a tensor that was not made an nn.Parameter; here the ReZero scale, at 0."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_spirals(made.stream("data"))
        model = _Scaled(2, made.integer(24, 40), made.integer(2, 4), 3, faulty)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        return supervise(made, model, data, optimizer, steps=260, keys=("loss", "val_loss"))

    course, notes, twin = both(make, recorder, draw)
    names = [name for name, _ in course.model.named_parameters() if name.startswith("blocks")]
    still = [name for name in names if notes.moved(name) == 0.0]
    return broken(
        len(still) == len(names) and given_away(notes, twin) > 0.3,
        f"{len(still)} of {len(names)} tensors of the blocks never moved; proof {notes.end:.4g} "
        f"against {twin.end:.4g}",
        expected=("stagnant_layers",),
        tolerated=("vanishing_gradients", "plateau", "update_ratio", "mostly_frozen"),
        culprits=tuple(sorted({name.rsplit(".", 1)[0] for name in names} | {"blocks"})),
        onset_step=0,
    )


def rates_decayed_by_layer(recorder: Recorder, draw: Draw) -> Truth:
    """ULMFiT's discriminative rates with 2.6 meant and 1,000 written: low layers never move."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_shapes(made.stream("data"), count=700)
        channels = made.integer(6, 10)
        model = nn.Sequential()
        before = 1
        for place in range(4):
            model.add_module(f"conv{place}", nn.Conv2d(before, channels, 3, padding=1))
            model.add_module(f"act{place}", nn.ReLU())
            if place % 2:
                model.add_module(f"pool{place}", nn.MaxPool2d(2))
            before = channels
        model.add_module("flatten", nn.Flatten())
        model.add_module("head", nn.Linear(16 * channels, 4))
        with torch.no_grad():
            # A filter bank that was read wrongly: nearly blind until the low layers move.
            model.conv0.weight.mul_(0.02)
            model.conv0.bias.fill_(0.2)
        decay = 1000.0 if faulty else 1.3
        parts = ["head", "conv3", "conv2", "conv1", "conv0"]
        groups = [
            {"params": list(model.get_submodule(part).parameters()), "lr": 0.004 / decay**place}
            for place, part in enumerate(parts)
        ]
        return supervise(made, model, data, torch.optim.Adam(groups), steps=200)

    _, notes, twin = both(make, recorder, draw)
    low = ["conv0.weight", "conv1.weight"]
    far = [notes.moved(name) for name in low]
    return broken(
        max(far) < 1e-4 and given_away(notes, twin) > 0.2,
        f"conv0 and conv1 moved by {far[0]:.2g} and {far[1]:.2g} of their norm (twin "
        f"{twin.moved(low[0]):.2g}); proof {notes.end:.4g} against {twin.end:.4g}",
        expected=("stagnant_layers",),
        tolerated=("update_ratio", "plateau", "vanishing_gradients", "mostly_frozen"),
        culprits=("conv0", "conv1", "conv2"),
        onset_step=0,
    )


SCENARIOS = (
    Scenario(
        name="fourth/runtime_bottleneck_risk/checkpoints_cost_half",
        kind="fault",
        train=checkpoints_cost_half,
    ),
    Scenario(name="fourth/update_ratio/adamw_at_a_tenth", kind="fault", train=adamw_at_a_tenth),
    Scenario(
        name="fourth/vanishing_gradients/deep_plain_network", kind="fault", train=deep_plain_network
    ),
    Scenario(
        name="fourth/vanishing_gradients/judge_too_strong", kind="fault", train=judge_too_strong
    ),
    Scenario(
        name="fourth/stagnant_layers/scale_not_a_parameter",
        kind="fault",
        train=scale_not_a_parameter,
    ),
    Scenario(
        name="fourth/stagnant_layers/rates_decayed_by_layer",
        kind="fault",
        train=rates_decayed_by_layer,
    ),
)
