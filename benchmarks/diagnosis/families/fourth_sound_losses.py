"""Healthy trainings whose loss looks odd: its scale, its sign, its floor, its noise, its rise."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.fourth_course import Course, Notes, sound, train
from benchmarks.diagnosis.families.fourth_tasks import (
    Batches,
    Vae,
    cross_entropy,
    draw_ring,
    evaluate,
    hit_rate,
    load_masks,
    supervise,
)
from benchmarks.diagnosis.recorder import Recorder, SilentRecorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _run(course: Course, recorder: Recorder, draw: Draw) -> Notes:
    return train(course, recorder, draw)


def summed_over_pixels(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch examples, VAE: binary cross-entropy with reduction="sum"; losses of thousands."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    model = Vae(64, draw.integer(64, 96), draw.integer(6, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = Batches(draw, data.x, data.x, 64)

    def measure(x: Tensor) -> Tensor:
        made, mean, spread = model(x)
        errors = functional.binary_cross_entropy(made, x, reduction="sum")
        return errors - 0.5 * torch.sum(1 + spread - mean.square() - spread.exp())

    def validate() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            loss = float(measure(data.val_x))
        model.train()
        return {"val/loss": loss / len(data.val_x)}

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(batches.take()[0]),
        proof=lambda seen: float(functional.mse_loss(seen(data.proof_x)[0], data.proof_x)),
        held_out=validate,
        steps=280,
        per_epoch=batches.per_epoch,
    )
    return sound(_run(course, recorder, draw), "losses are sums over batch and pixels", gain=0.4)


def sparse_code(recorder: Recorder, draw: Draw) -> Truth:
    """Sparse autoencoders (Bricken et al. 2023): most units are 0 for each input, as is wanted."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    centre, scale = data.x.mean(0), data.x.std(0).mean()
    data = replace(
        data, **{name: (getattr(data, name) - centre) / scale for name in ("x", "val_x", "proof_x")}
    )
    width = draw.integer(96, 160)

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(64, width)
            self.act = nn.ReLU()
            self.decoder = nn.Linear(width, 64)
            with torch.no_grad():
                self.encoder.weight.copy_(functional.normalize(self.decoder.weight, dim=0).T)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            code = self.act(self.encoder(x))
            return self.decoder(code), code

    model = Sparse()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    batches = Batches(draw, data.x, data.x, 64)
    weight = draw.log_uniform(2.0, 3.0)

    def measure(x: Tensor) -> Tensor:
        made, code = model(x)
        return functional.mse_loss(made, x) + weight * code.mean()

    def validate() -> dict[str, float]:
        with torch.no_grad():
            made, code = model(data.val_x)
        return {
            "val/mse": float(functional.mse_loss(made, data.val_x)),
            "val/active": float((code > 0).double().mean()),
        }

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(batches.take()[0]),
        proof=lambda seen: float(functional.mse_loss(seen(data.proof_x)[0], data.proof_x)),
        held_out=validate,
        steps=280,
        per_epoch=batches.per_epoch,
    )
    notes = _run(course, recorder, draw)
    with torch.no_grad():
        code = model(data.x)[1]
    active = float((code > 0).double().mean())
    living = float((code.amax(0) > 0).double().mean())
    if living < 0.85 or active > 0.3:
        return Truth(kind="unclear", reason=f"{living:.0%} of the units live, {active:.0%} on")
    return sound(notes, f"{active:.0%} of the units are on at a time, {living:.0%} live", gain=0.5)


def likelihood_below_zero(recorder: Recorder, draw: Draw) -> Truth:
    """Forum: "negative loss with GaussianNLLLoss": a density may be above 1."""
    rng = draw.stream("data")
    x = rng.uniform(-2, 2, (1000, 1))
    y = 0.3 * np.sin(2 * x) + (0.01 + 0.02 * np.abs(x)) * rng.normal(size=x.shape)
    ins, outs = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    data = datasets.Data(
        ins[:600], outs[:600], ins[600:800], outs[600:800], ins[800:], outs[800:], classes=0
    )
    width = draw.integer(32, 64)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.006)

    def measure(output: Tensor, target: Tensor) -> Tensor:
        variance = functional.softplus(output[:, 1:]) + 1e-5
        return functional.gaussian_nll_loss(output[:, :1], target, variance)

    course = supervise(
        draw, model, data, optimizer, measure=measure, steps=300,
        keys=("train/nll", "val/nll"), clip=5.0,
    )  # fmt: skip
    notes = _run(course, recorder, draw)
    return sound(notes, f"loss ends at {np.median(notes.losses[-20:]):.2f}", gain=1.2)


def adversaries_in_balance(recorder: Recorder, draw: Draw) -> Truth:
    """Goodfellow's tutorial 2016: both losses of a GAN go up and down; samples get better."""
    rng = draw.stream("data")
    points, kept = draw_ring(rng, 2000), draw_ring(rng, 300)
    maker = nn.Sequential(
        nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)
    )
    judge = nn.Sequential(
        nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
    )
    with torch.no_grad():
        maker[4].bias.add_(1.5)
    optimizer = torch.optim.Adam(maker.parameters(), lr=0.002, betas=(0.5, 0.9))
    other = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.9))
    batches = Batches(draw, points, points, 64)
    seen = {"judge": 0.0}

    def take(_step: int) -> Tensor:
        real, _ = batches.take()
        with torch.no_grad():
            fake = maker(torch.randn(64, 4))
        real = real.requires_grad_()
        verdict = judge(real)
        judged = (functional.softplus(-verdict) + functional.softplus(judge(fake))).mean()
        # The gradient penalty of Mescheder et al. 2018 makes the game converge.
        (slope,) = torch.autograd.grad(verdict.sum(), real, create_graph=True)
        other.zero_grad()
        (judged + 0.5 * slope.square().sum(1).mean()).backward()
        other.step()
        seen["judge"] = float(judged.detach())
        return functional.softplus(-judge(maker(torch.randn(64, 4)))).mean()

    def distance(model: nn.Module) -> float:
        fake = model(torch.randn(300, 4))
        apart = torch.cdist(fake, kept).mean() * 2
        return float(apart - torch.cdist(fake, fake).mean() - torch.cdist(kept, kept).mean())

    course = Course(
        model=maker,
        optimizer=optimizer,
        loss=take,
        proof=distance,
        loss_key="loss_G",
        extra=lambda: {"loss_D": seen["judge"]},
        steps=350,
    )
    notes = _run(course, recorder, draw)
    return sound(notes, "energy distance of samples to the data", gain=0.7)


def smoothed_labels(recorder: Recorder, draw: Draw) -> Truth:
    """Szegedy et al. 2016: with smoothed labels the loss has a floor far above 0."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1)
    width = draw.integer(48, 96)
    amount = draw.uniform(0.1, 0.3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)

    def measure(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, label_smoothing=amount)

    course = supervise(
        draw, model, data, optimizer, measure=measure, steps=300,
        proof=lambda output, target: torch.tensor(1.0 - hit_rate(output, target)),
    )  # fmt: skip
    notes = _run(course, recorder, draw)
    floor = float(np.median(notes.losses[-20:]))
    return sound(notes, f"labels smoothed by {amount:.2f}, loss stands at {floor:.2f}", gain=0.8)


def distilled(recorder: Recorder, draw: Draw) -> Truth:
    """Hinton et al. 2015: the student's loss is a divergence at temperature 4, times 16."""
    data = datasets.load_digits(draw.stream("data"), noise=0.1).flatten()
    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    taught = supervise(
        draw, teacher, data, torch.optim.Adam(teacher.parameters(), lr=0.003), steps=250
    )
    train(taught, SilentRecorder(), draw)
    model = nn.Sequential(nn.Linear(64, draw.integer(16, 28)), nn.ReLU())
    model.add_module("2", nn.Linear(model[0].out_features, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    batches = Batches(draw, data.x, data.y, 32)

    def measure(x: Tensor, student: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = functional.softmax(teacher(x) / 4, dim=1)
        learnt = functional.log_softmax(student / 4, dim=1)
        return 16 * functional.kl_div(learnt, wanted, reduction="batchmean")

    def take(_step: int) -> Tensor:
        x, _ = batches.take()
        return measure(x, model(x))

    def validate() -> dict[str, float]:
        output = evaluate(model, data.val_x)
        return {
            "val/distill_loss": float(measure(data.val_x, output)),
            "val/acc": hit_rate(output, data.val_y),
        }

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=lambda seen: float(cross_entropy(seen(data.proof_x), data.proof_y)),
        held_out=validate,
        steps=280,
        loss_key="train/distill_loss",
        per_epoch=batches.per_epoch,
    )
    return sound(_run(course, recorder, draw), "a student of a trained teacher", gain=0.6)


def contrasted_pairs(recorder: Recorder, draw: Draw) -> Truth:
    """SimCLR 2020: the loss falls from ln(batch) to a floor that is far from 0."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    width = draw.integer(64, 96)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    batches = Batches(draw, data.x, data.y, 96)
    noise = draw.uniform(0.2, 0.3)

    def take(_step: int) -> Tensor:
        x, _ = batches.take()
        one, two = (
            functional.normalize(model(x + noise * torch.randn_like(x)), dim=1) for _ in range(2)
        )
        return functional.cross_entropy(one @ two.T / 0.2, torch.arange(len(x)))

    def match(seen: nn.Module) -> float:
        x = data.proof_x[:200]
        one, two = (
            functional.normalize(seen(x + noise * torch.randn_like(x)), dim=1) for _ in range(2)
        )
        return float(functional.cross_entropy(one @ two.T / 0.2, torch.arange(len(x))))

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=match,
        steps=280,
        loss_key="train/info_nce",
        per_epoch=batches.per_epoch,
    )
    return sound(_run(course, recorder, draw), "two views of each image find each other", gain=0.3)


def noise_predicted(recorder: Recorder, draw: Draw) -> Truth:
    """Ho et al. 2020: a denoiser's loss falls soon, then stands and is noisy."""
    rng = draw.stream("data")
    points, kept = draw_ring(rng, 2000, modes=4), draw_ring(rng, 500, modes=4)
    width = draw.integer(64, 96)
    model = nn.Sequential(
        nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    batches = Batches(draw, points, points, 64)

    def measure(network: nn.Module, x: Tensor) -> Tensor:
        time = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        angle = 0.5 * torch.pi * time
        mixed = angle.cos() * x + angle.sin() * noise
        guess = network(torch.cat([mixed, time, (4 * angle).sin()], 1))
        return functional.mse_loss(guess, noise)

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(model, batches.take()[0]),
        proof=lambda seen: float(measure(seen, kept)),
        steps=350,
        per_epoch=batches.per_epoch,
    )
    return sound(_run(course, recorder, draw), "noise is predicted at random times", gain=0.4)


def masks_by_dice(recorder: Recorder, draw: Draw) -> Truth:
    """Milletari et al. 2016: one minus the Dice coefficient, between 0 and 1, of small masks."""
    data = load_masks(draw.stream("data"))
    channels = draw.integer(6, 10)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 1, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    def measure(output: Tensor, target: Tensor) -> Tensor:
        given = torch.sigmoid(output)
        both = 2 * (given * target).sum((1, 2, 3)) + 1
        return (1 - both / (given.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()

    course = supervise(
        draw, model, data, optimizer, measure=measure, steps=220, size=16,
        keys=("train/dice_loss", "val/dice_loss"),
    )  # fmt: skip
    return sound(_run(course, recorder, draw), "Dice loss of masks", gain=0.3)


def pairs_with_margin(recorder: Recorder, draw: Draw) -> Truth:
    """FaceNet 2015 on easy pairs: more and more losses, and so gradients, are exactly 0."""
    rng = draw.stream("data")
    items = torch.from_numpy(rng.normal(size=(1200, 12))).float()
    taste = torch.from_numpy(rng.normal(size=12)).float()
    worth = items @ taste + 0.5 * (items[:, 0] * items[:, 1])
    width = draw.integer(32, 64)
    model = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)

    def pair(low: int, high: int, count: int) -> tuple[Tensor, Tensor]:
        one = torch.randint(low, high, (count,))
        two = torch.randint(low, high, (count,))
        better = worth[one] > worth[two]
        # Only pairs that are clearly apart are asked for.
        clear = (worth[one] - worth[two]).abs() > 2
        one, two, better = one[clear], two[clear], better[clear]
        return items[torch.where(better, one, two)], items[torch.where(better, two, one)]

    def measure(network: nn.Module, low: int, high: int, count: int) -> Tensor:
        good, bad = pair(low, high, count)
        return (1.0 - network(good) + network(bad)).relu().mean()

    def validate() -> dict[str, float]:
        with torch.no_grad():
            good, bad = pair(800, 1000, 400)
            ahead = model(good) - model(bad)
        return {
            "val/hinge": float((1 - ahead).relu().mean()),
            "val/pair_accuracy": float((ahead > 0).double().mean()),
        }

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=lambda _step: measure(model, 0, 800, 24),
        proof=lambda seen: float(measure(seen, 1000, 1200, 1000)),
        held_out=validate,
        steps=300,
        loss_key="train/hinge",
    )
    notes = _run(course, recorder, draw)
    none = sum(loss == 0.0 for loss in notes.losses)
    return sound(notes, f"{none} of 300 losses are exactly 0", gain=0.7)


def divergence_annealed(recorder: Recorder, draw: Draw) -> Truth:
    """Bowman et al. 2016: the weight of the divergence rises from 0, and the loss rises with it."""
    data = datasets.load_digits(draw.stream("data")).flatten()
    model = Vae(64, draw.integer(64, 96), draw.integer(6, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    batches = Batches(draw, data.x, data.x, 64)
    seen = {"error": 0.0, "kl": 0.0, "beta": 0.0}
    highest = draw.uniform(0.4, 0.8)

    def take(step: int) -> Tensor:
        x, _ = batches.take()
        made, mean, spread = model(x)
        error = (made - x).square().sum(1).mean()
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        beta = highest * min(1.0, max(0.0, (step - 80) / 150))
        seen.update(error=float(error.detach()), kl=float(kl.detach()), beta=beta)
        return error + beta * kl

    def whole(model: nn.Module) -> float:
        made, mean, spread = model(data.proof_x)
        error = (made - data.proof_x).square().sum(1).mean()
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        # The objective that is wanted in the end, whatever the weight is now.
        return float(error + highest * kl)

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=whole,
        steps=300,
        extra=lambda: {"train/recon": seen["error"], "train/kl": seen["kl"], "beta": seen["beta"]},
        per_epoch=batches.per_epoch,
    )
    notes = _run(course, recorder, draw)
    low, end = min(notes.losses), float(np.median(notes.losses[-10:]))
    return sound(notes, f"the loss rises from {low:.3g} to {end:.3g} by design", gain=0.15)


def rare_class_weighted(recorder: Recorder, draw: Draw) -> Truth:
    """Forum: CrossEntropyLoss(weight=...): a batch with two rare samples looks like a spike."""
    share = draw.uniform(0.03, 0.06)
    data = datasets.load_blobs(
        draw.stream("data"), features=10, classes=2, spread=1.6, shares=(1 - share, share),
        count=3000,
    )  # fmt: skip
    width = draw.integer(16, 32)
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    weight = torch.tensor([0.5 / (1 - share), 0.5 / share])

    def measure(output: Tensor, target: Tensor) -> Tensor:
        losses = functional.cross_entropy(output, target, reduction="none")
        return (weight[target] * losses).mean()

    course = supervise(
        draw, model, data, optimizer, measure=measure, size=24, steps=300, accuracy=False
    )
    return sound(_run(course, recorder, draw), f"{share:.0%} of class 1, weighted", gain=0.5)


def outliers_in_targets(recorder: Recorder, draw: Draw) -> Truth:
    """Huber 1964: heavy tails in the targets make single losses huge; his loss stands it."""
    data = datasets.load_friedman(draw.stream("data"), noise=0.3)
    rng = draw.stream("outliers")
    for part in (data.y, data.val_y, data.proof_y):
        part.sub_(14.4).div_(5.0)
    y = data.y.clone()
    chosen = torch.from_numpy(rng.permutation(len(y))[: int(0.02 * len(y))])
    y[chosen] += torch.from_numpy(rng.choice([-1, 1], (len(chosen), 1)) * 40.0).float()
    data = replace(data, y=y)
    width = draw.integer(32, 64)
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    course = supervise(
        draw, model, data, optimizer, measure=functional.huber_loss, proof=functional.mse_loss,
        size=48, steps=300, keys=("train/huber", "val/huber"),
    )  # fmt: skip
    return sound(_run(course, recorder, draw), "2 % of the targets are 40 off", gain=0.5)


def noisy_returns(recorder: Recorder, draw: Draw) -> Truth:
    """Henderson et al. 2018: a policy gradient's loss says nothing; returns rise under noise."""
    rng = draw.stream("data")
    contexts, arms = 6, draw.integer(4, 6)
    worth = torch.from_numpy(rng.normal(size=(contexts, arms))).float()
    model = nn.Sequential(nn.Linear(contexts, 32), nn.Tanh(), nn.Linear(32, arms))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    seen = {"reward": 0.0}
    base = {"value": 0.0}

    def take(_step: int) -> Tensor:
        context = torch.randint(contexts, (32,))
        policy = torch.distributions.Categorical(
            logits=model(functional.one_hot(context, contexts).float())
        )
        arm = policy.sample()
        reward = worth[context, arm] + 1.0 * torch.randn(32)
        seen["reward"] = float(reward.mean())
        gain = reward - base["value"]
        base["value"] += 0.05 * (seen["reward"] - base["value"])
        return -(policy.log_prob(arm) * gain).mean() - 0.01 * policy.entropy().mean()

    def regret(model: nn.Module) -> float:
        chosen = functional.softmax(model(torch.eye(contexts)), dim=1)
        return float((worth.max(1).values - (chosen * worth).sum(1)).mean())

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=regret,
        extra=lambda: {"episode/return": seen["reward"]},
        loss_key="policy_loss",
        steps=350,
    )
    return sound(_run(course, recorder, draw), "regret of the policy", gain=0.5)


def values_that_grow(recorder: Recorder, draw: Draw) -> Truth:
    """DQN threads, "loss increases but reward too": values, and errors with them, grow from 0."""
    length, discount = draw.integer(6, 9), 0.95
    model = nn.Sequential(nn.Linear(length, 48), nn.ReLU(), nn.Linear(48, 2))
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    states = torch.eye(length)

    def walk(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        after = (state + 2 * action - 1).clamp(0, length - 1)
        done = after == length - 1
        return after, 10.0 * done.float() - 0.1, done

    # What the best policy is worth, for the examiner.
    best = torch.zeros(length, 2)
    place = torch.arange(length)
    for _ in range(200):
        for action in range(2):
            after, reward, done = walk(place, torch.full((length,), action))
            best[:, action] = reward + discount * (~done) * best.max(1).values[after]
    best = best[:-1]

    def take(step: int) -> Tensor:
        if step % 10 == 0:
            target.load_state_dict(model.state_dict())
        state, action = torch.randint(length - 1, (64,)), torch.randint(2, (64,))
        after, reward, done = walk(state, action)
        with torch.no_grad():
            wanted = reward + discount * (~done) * target(states[after]).max(1).values
        given = model(states[state]).gather(1, action[:, None]).squeeze(1)
        return functional.smooth_l1_loss(given, wanted)

    course = Course(
        model=model,
        optimizer=optimizer,
        loss=take,
        proof=lambda seen: float((seen(states[:-1]) - best).abs().mean()),
        loss_key="td_loss",
        extra=lambda: {"q_mean": float(model(states).detach().mean())},
        steps=400,
    )
    return sound(_run(course, recorder, draw), "distance to the true values", gain=0.6)


def _scenario(train_it: object) -> Scenario:
    name = train_it.__name__  # type: ignore[attr-defined]
    return Scenario(name=f"fourth/healthy/{name}", kind="healthy", train=train_it)  # type: ignore[arg-type]


SCENARIOS = tuple(
    _scenario(train_it)
    for train_it in (
        summed_over_pixels,
        sparse_code,
        likelihood_below_zero,
        adversaries_in_balance,
        smoothed_labels,
        distilled,
        contrasted_pairs,
        noise_predicted,
        masks_by_dice,
        pairs_with_margin,
        divergence_annealed,
        rare_class_weighted,
        outliers_in_targets,
        noisy_returns,
        values_that_grow,
    )
)
