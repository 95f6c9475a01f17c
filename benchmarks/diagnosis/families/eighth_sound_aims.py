"""Healthy trainings whose aims give odd curves: games, likelihoods, rewards, floors, orders."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.eighth_course import Course, fit, judge_sound
from benchmarks.diagnosis.families.eighth_tasks import (
    SmallResNet,
    cut,
    make_chain,
    make_images,
    sample,
    supervise,
)
from benchmarks.diagnosis.networks import Transformer, make_convolutional, make_mlp
from benchmarks.diagnosis.recorder import Recorder, SilentRecorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _weighted_rarity(recorder: Recorder, draw: Draw) -> Truth:
    """Four per cent of positives, weighted by their rarity: recall is wanted, not accuracy."""
    rng = draw.stream("payments")
    x = rng.normal(size=(3000, 12))
    risk = x[:, 0] + x[:, 1] + 0.7 * np.abs(x[:, 2]) + 0.2 * rng.normal(size=3000)
    data = cut(x, (risk > np.quantile(risk, 0.96)).astype(np.int64), 2)
    model = make_mlp([12, 32, 2], activation="relu")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    weight = torch.tensor([1.0, 24.0])

    def weigh(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, weight)

    course = supervise(draw, model, optimizer, data, loss=weigh, size=64, steps=260)
    plain = course.check

    def check(step: int) -> dict[str, float]:
        assert plain is not None
        with torch.no_grad():
            said = model(data.val_x).argmax(1)
        return {**plain(step), "val/recall": float((said[data.val_y == 1] == 1).float().mean())}

    course.check = check
    return judge_sound(fit(course, recorder), 0.3, "one in 25 is positive, and weighs for it")


def _corners(rng: np.random.Generator, count: int) -> Tensor:
    points = rng.choice([-1.0, 1.0], (count, 2)) + 0.15 * rng.normal(size=(count, 2))
    return torch.tensor(points, dtype=torch.float32)


def _critic_and_maker(recorder: Recorder, draw: Draw) -> Truth:
    """Gulrajani et al. 2017: a Wasserstein game; both losses wander, and go below zero."""
    rng = draw.stream("corners")
    model = nn.ModuleDict(
        {
            "generator": make_mlp([4, 48, 48, 2], activation="relu"),
            "critic": make_mlp([2, 48, 48, 1], activation="leaky"),
        }
    )
    generator, critic = model["generator"], model["critic"]
    makers = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    real_test = _corners(draw.stream("test"), 400)

    def judge(real: Tensor) -> float:
        with torch.no_grad():
            made = generator(torch.randn(len(real), 4))
        between = (real + torch.rand(len(real), 1) * (made - real)).requires_grad_(True)
        slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
        gap = critic(made).mean() - critic(real).mean()
        judges.zero_grad()
        (gap + 1.0 * (slope.norm(dim=1) - 1).square().mean()).backward()
        judges.step()
        return gap.item()

    def lose(_net: nn.Module, real: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
        gaps = [judge(real), *(judge(_corners(rng, 64)) for _ in range(3))]
        generator.zero_grad()
        return -critic(generator(torch.randn(64, 4))).mean(), {"critic_loss": gaps[-1]}

    def distance(net: Any) -> float:
        made = net["generator"](torch.randn(400, 4))
        within = torch.cdist(made, made).mean() + torch.cdist(real_test, real_test).mean()
        return float(2 * torch.cdist(made, real_test).mean() - within)

    def check(_step: int) -> dict[str, float]:
        with torch.no_grad():
            return {"eval/energy_distance": distance(model)}

    course = Course(
        model,
        [makers, judges],
        lambda _step: _corners(rng, 64),
        lose,
        distance,
        check,
        steps=400,
        key="generator_loss",
        update=lambda _step: makers.step(),
    )
    notes = fit(course, recorder)
    return judge_sound(notes, 0.12 * notes.begin, "a game of two", calm=False)


def _noisy_rewards(recorder: Recorder, draw: Draw) -> Truth:
    """Williams 1992: a policy by its gradient; the loss hovers around zero while rewards rise."""
    rng = draw.stream("bandit")
    taste = rng.normal(size=(8, 4))
    model = make_mlp([8, 32, 4], activation="tanh")
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    test = torch.tensor(draw.stream("test").normal(size=(500, 8)), dtype=torch.float32)
    worth = torch.tensor(taste, dtype=torch.float32)
    usual = [0.0]

    def batch(_step: int) -> Tensor:
        return torch.tensor(rng.normal(size=(64, 8)), dtype=torch.float32)

    def lose(net: nn.Module, state: Tensor, _step: int) -> tuple[Tensor, dict[str, float]]:
        policy = torch.distributions.Categorical(logits=net(state))
        action = policy.sample()
        reward = (state @ worth).gather(1, action[:, None])[:, 0] + 2.0 * torch.randn(64)
        gain = reward - usual[0]
        usual[0] += 0.05 * float(gain.mean())
        loss = -(policy.log_prob(action) * gain).mean() - 0.01 * policy.entropy().mean()
        return loss, {
            "rollout/reward": float(reward.mean()),
            "train/entropy": policy.entropy().mean().item(),
        }

    def regret(net: nn.Module) -> float:
        value = test @ worth
        return float(
            (value.max(1).values - value.gather(1, net(test).argmax(1)[:, None])[:, 0]).mean()
        )

    course = Course(
        model,
        optimizer,
        batch,
        lose,
        regret,
        steps=500,
        key="train/policy_loss",
        start={"layers": False},
    )
    notes = fit(course, recorder)
    return judge_sound(notes, 0.2 * notes.begin, "rewards with much noise", calm=False)


def _mixed_images(recorder: Recorder, draw: Draw) -> Truth:
    """Zhang et al. 2018: mixup, smoothed labels, dropout; the training loss stays high."""
    data = make_images(draw, classes=6, noise=0.5)
    model = make_convolutional([8, 16], 12, 6)
    model.head = nn.Sequential(nn.Dropout(0.4), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    course = supervise(draw, model, optimizer, data, steps=360, train_accuracy="")
    rng = draw.stream("mix")

    def lose(net: nn.Module, got: Any, _step: int) -> tuple[Tensor, dict[str, float]]:
        share = float(rng.beta(1.0, 1.0))
        other = torch.from_numpy(rng.permutation(len(got[0])))
        output = net(share * got[0] + (1 - share) * got[0][other])
        one = functional.cross_entropy(output, got[1], label_smoothing=0.1)
        two = functional.cross_entropy(output, got[1][other], label_smoothing=0.1)
        return share * one + (1 - share) * two, {}

    course.lose = lose
    course.proof = lambda net: float((net(data.proof_x).argmax(1) != data.proof_y).float().mean())
    return judge_sound(fit(course, recorder), 0.05, "mixed images: the training loss stays above 1")


class _Adder(nn.Module):
    """A gated network and a readout."""

    def __init__(self, width: int):
        super().__init__()
        self.gru = nn.GRU(2, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return self.out(self.gru(x)[0][:, -1])


def _longer_and_longer(recorder: Recorder, draw: Draw) -> Truth:
    """Bengio et al. 2009: short rows first; at each longer length the loss jumps."""
    lengths = (4, 8, 16)
    sets = [sequences.load_adding(draw.stream(f"rows{n}"), length=n, count=2400) for n in lengths]
    model = _Adder(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    course = supervise(draw, model, optimizer, sets[-1], size=48, steps=540, clip=1.0)
    take = sample(draw.again(), len(sets[0].x), 48)

    def batch(step: int) -> Any:
        ids, now = take(step), sets[min(2, step // 150)]
        return now.x[ids], now.y[ids], ids

    plain = course.lose

    def lose(net: nn.Module, got: Any, step: int) -> tuple[Tensor, dict[str, float]]:
        loss, logged = plain(net, got, step)
        return loss, {**logged, "curriculum/length": float(lengths[min(2, step // 150)])}

    course.batch, course.lose = batch, lose
    return judge_sound(fit(course, recorder), 0.02, "rows grow at steps 150 and 300")


def _below_zero(recorder: Recorder, draw: Draw) -> Truth:
    """Nix and Weigend 1994: the likelihood of a mean and a variance, below zero."""
    rng = draw.stream("curve")
    x = rng.uniform(-2, 2, (2000, 1))
    y = np.sin(2 * x) + (0.03 + 0.1 * np.abs(x)) * rng.normal(size=x.shape)
    model = make_mlp([1, 48, 48, 2], activation="tanh")
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def likelihood(output: Tensor, target: Tensor) -> Tensor:
        variance = functional.softplus(output[:, 1:]) + 1e-4
        return functional.gaussian_nll_loss(output[:, :1], target, variance)

    course = supervise(
        draw,
        model,
        optimizer,
        cut(x, y, 0),
        loss=likelihood,
        steps=500,
        size=64,
        names=("train/nll", "val/nll", ""),
        per_epoch=None,
        start={"layers": False, "parameters": False},
    )
    course.before = lambda step: optimizer.param_groups[0].update(lr=4e-3 * (1 - step / 520))
    return judge_sound(fit(course, recorder), -1.0, "a likelihood below zero")


def _floor_of_the_source(recorder: Recorder, draw: Draw) -> Truth:
    """One pass over texts of a Markov chain: the loss lies flat at the entropy."""
    data, entropy = make_chain(draw, count=16_000, length=16, sharpness=1.0)
    model = Transformer(12, 32, 1, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    course = supervise(
        draw,
        model,
        optimizer,
        data,
        size=32,
        steps=300,
        names=("train/loss", "eval/loss", ""),
        log_every=5,
        check_every=50,
    )
    course.before = lambda step: optimizer.param_groups[0].update(
        lr=3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.95 * step / 300)
    )
    notes = fit(course, recorder)
    return judge_sound(notes, entropy + 0.06, f"nobody is better than {entropy:.3f}")


def _taught(recorder: Recorder, draw: Draw) -> Truth:
    """Hinton et al. 2015: soft labels at temperature 4; the loss is another one."""
    data = make_images(draw, classes=8)
    teacher = SmallResNet(16, 1, 8)
    course = supervise(draw, teacher, torch.optim.Adam(teacher.parameters(), 3e-3), data)
    for step in range(160):
        teacher.zero_grad()
        course.lose(teacher, course.batch(step), step)[0].backward()
        course.optimizer.step()
    teacher.eval()
    student = make_convolutional([6, 8], 12, 8, hidden=16)
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    course = supervise(draw, student, optimizer, data, steps=420)

    def lose(net: nn.Module, got: Any, _step: int) -> tuple[Tensor, dict[str, float]]:
        with torch.no_grad():
            soft = (teacher(got[0]) / 4).softmax(1)
        output = net(got[0])
        distilled = 16 * functional.kl_div((output / 4).log_softmax(1), soft, reduction="batchmean")
        hard = functional.cross_entropy(output, got[1])
        return 0.7 * distilled + 0.3 * hard, {"train/kd": distilled.item(), "train/ce": hard.item()}

    course.lose, course.key = lose, "train/loss"
    return judge_sound(fit(course, recorder), 0.25, "a student of soft labels")


_GOAL = 24


def _walk(place: int, action: int) -> tuple[int, float]:
    row, column = divmod(place, 5)
    row += (action == 0) * (row < 4) - (action == 1) * (row > 0)
    column += (action == 2) * (column < 4) - (action == 3) * (column > 0)
    after = 5 * row + column
    return after, 1.0 if after == _GOAL else -0.02


def _values_that_grow(recorder: Recorder, draw: Draw) -> Truth:
    """Mnih et al. 2015: Q-learning with a target network; the loss rises while the returns do."""
    rng, model = draw.stream("walk"), make_mlp([25, 48, 4], activation="relu")
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    memory: list[tuple[int, int, float, int]] = []
    here, eye = [0], torch.eye(25)

    def batch(step: int) -> Tensor:
        for _ in range(8):
            with torch.no_grad():
                best = int(model(eye[here[0]][None]).argmax())
            action = int(rng.integers(4)) if rng.uniform() < max(0.2, 1 - step / 200) else best
            after, reward = _walk(here[0], action)
            memory.append((here[0], action, reward, after))
            here[0] = int(rng.integers(24)) if after == _GOAL or rng.uniform() < 0.03 else after
        return torch.tensor(
            [memory[i] for i in rng.integers(max(0, len(memory) - 2500), len(memory), 64)]
        )

    def lose(net: nn.Module, got: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
        if step % 40 == 0:
            target.load_state_dict(net.state_dict())
        before, action, after = got[:, 0].long(), got[:, 1].long(), got[:, 3].long()
        value = net(eye[before]).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            later = target(eye[after]).max(1).values * (after != _GOAL)
        loss = functional.smooth_l1_loss(value, got[:, 2] + 0.95 * later)
        return loss, {"train/q_mean": value.mean().item()}

    def shortfall(net: nn.Module) -> float:
        total = 0.0
        for start in range(24):
            place, discount = start, 1.0
            for _ in range(12):
                place, reward = _walk(place, int(net(eye[place][None]).argmax()))
                total, discount = total + discount * reward, 0.95 * discount
                if place == _GOAL:
                    break
        return -total / 24

    def check(_step: int) -> dict[str, float]:
        with torch.no_grad():
            return {"eval/return": -shortfall(model)}

    course = Course(model, optimizer, batch, lose, shortfall, check, steps=500, key="train/td_loss")
    return judge_sound(fit(course, recorder), -0.6, "values grow, and their errors", calm=False)


def _chronological(recorder: Recorder, draw: Draw) -> Truth:
    """A forecast of up or down, trained in the order of time on purpose; both come all the time."""
    rng, times = draw.stream("market"), np.arange(3000)
    series = np.sin(0.35 * times) + 0.6 * np.sin(0.11 * times + 1) + 0.1 * rng.normal(size=3000)
    windows = np.lib.stride_tricks.sliding_window_view(series, 17)
    data = cut(windows[:, :16].copy(), (windows[:, 16] > windows[:, 15]).astype(np.int64), 2)
    model = make_mlp([16, 32, 32, 2], activation="relu")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    course = supervise(
        draw, model, optimizer, data, size=32, steps=392, train_accuracy="train/accuracy"
    )
    other = copy.deepcopy(model)
    shuffled = supervise(draw, other, torch.optim.Adam(other.parameters(), 3e-3), data, steps=392)
    aim = 1.25 * fit(shuffled, SilentRecorder()).end
    count = len(data.x) // 32

    def batch(step: int) -> Any:
        ids = torch.arange(32) + 32 * (step % count)
        return data.x[ids], data.y[ids], ids

    course.batch, course.tell = batch, lambda got: {"labels": got[1], "sample_ids": got[2]}
    return judge_sound(
        fit(course, recorder), aim, "windows in the order of time, as good as shuffled"
    )


def _rare_but_right(recorder: Recorder, draw: Draw) -> Truth:
    """Feldman 2020: a rare style is hard for long, labelled rightly, and learnt."""
    data = datasets.load_digits(draw.stream("data"))
    for x in (data.x, data.val_x, data.proof_x):
        x[::14] = 1.0 - x[::14].flip(3)
    model = make_convolutional([8, 16], 8, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    course = supervise(draw, model, optimizer, data, size=24, steps=600, check_every=40)
    course.tell = lambda got: {"labels": got[1], "sample_ids": got[2]}
    notes = fit(course, recorder)
    model.eval()
    with torch.no_grad():
        hard = float(functional.cross_entropy(model(data.x[::14]), data.y[::14]))
    told = f"one in fourteen is drawn white on black and turned; their loss is {hard:.3f}"
    return judge_sound(notes, 0.3 if hard < 0.6 else -1.0, told)


SCENARIOS = tuple(
    Scenario(name=f"eighth/healthy/{name}", kind="healthy", train=train)
    for name, train in {
        "weighted_rarity": _weighted_rarity,
        "critic_and_maker": _critic_and_maker,
        "noisy_rewards": _noisy_rewards,
        "mixed_images": _mixed_images,
        "longer_and_longer": _longer_and_longer,
        "below_zero": _below_zero,
        "floor_of_the_source": _floor_of_the_source,
        "taught": _taught,
        "values_that_grow": _values_that_grow,
        "chronological": _chronological,
        "rare_but_right": _rare_but_right,
    }.items()
)
