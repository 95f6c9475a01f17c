"""Healthy trainings of the usual kind, and with habits that look like faults."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, zoo
from benchmarks.diagnosis.networks import make_mlp
from benchmarks.diagnosis.oracles import judge_healthy
from benchmarks.diagnosis.recorder import Recorder, SilentRecorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train

Make = Callable[[Draw], Problem]


def _any(draw: Draw, *names: str) -> Problem:
    return zoo.ZOO[draw.choice(*names)](draw)


def _scale_up(draw: Draw) -> Problem:
    """Mixed precision: the scale starts far too high, and the first steps are skipped."""
    made = _any(draw, "digits_mlp", "digits_cnn", "residual")
    made.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0 ** draw.integer(125, 127), growth_interval=60
    )
    made.start = {"grad_scaler": made.scaler}
    return made


def _accumulate(draw: Draw) -> Problem:
    made = _any(draw, "digits_mlp", "shapes_cnn", "friedman", "spirals")
    made.accumulate, made.batch_size = draw.choice(2, 4), 16
    for group in made.optimizer.param_groups:
        group["lr"] *= 1.5
    made.steps = 400
    return made


def _restart_warm(draw: Draw) -> Problem:
    made = _any(draw, "digits_mlp", "digits_cnn", "friedman", "spirals", "waves")
    period = draw.choice(60, 80, 100)
    made.rate = lambda step: 0.02 + 1.5 * 0.5 * (1.0 + math.cos(math.pi * (step % period) / period))
    return made


def _warm_up_and_anneal(draw: Draw) -> Problem:
    made = _any(draw, "residual", "text_transformer", "digits_mlp", "shapes_cnn", "autoencoder")
    warm = draw.integer(20, 60)
    made.rate = lambda step: (
        (step + 1) / warm
        if step < warm
        else 0.5 * (1.0 + math.cos(math.pi * (step - warm) / (made.steps - 1 - warm)))
    )
    made.log_rate = True
    return made


def _drop_rate(draw: Draw) -> Problem:
    """The rate falls to a tenth in steps, and to nothing for the last fifth."""
    made = _any(draw, "digits_mlp", "digits_cnn", "spirals", "brackets")
    made.rate = lambda step: (1.0, 1.0, 0.1, 0.01, 0.0)[min(4, 5 * step // made.steps)]
    return made


def _teach_harder(draw: Draw) -> Problem:
    """A curriculum: inputs get noisier in stages, so the training loss jumps up."""
    made = _any(draw, "digits_mlp", "digits_cnn", "shapes_cnn")
    noise = torch.Generator().manual_seed(draw.torch_seed)
    top = draw.uniform(0.4, 0.8)

    def harden(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        level = top * min(3, 4 * step // made.steps) / 3.0
        return x + level * torch.randn(x.shape, generator=noise), y

    made.change_batch = harden
    return made


def _tune_finely(draw: Draw) -> Problem:
    """Fine-tuning that starts where a training ended."""
    made = _any(draw, "digits_mlp", "digits_cnn", "friedman", "text_gru", "brackets")
    made.steps = 200
    train(made, SilentRecorder(), draw)
    for group in made.optimizer.param_groups:
        group["lr"] *= draw.uniform(0.03, 0.1)
    return made


def _use_raw_targets(draw: Draw) -> Problem:
    """Losses of many thousands: the targets come as they are."""
    made = zoo.make_friedman(draw, scale=draw.choice(30.0, 100.0, 300.0))
    with torch.no_grad():
        head = made.model.get_submodule("head")
        head.weight.mul_(float(made.data.y.std()))
    for group in made.optimizer.param_groups:
        group["lr"] *= 4.0
    made.steps = 400
    return made


def _sum_loss(draw: Draw) -> Problem:
    """The loss is the sum over the batch, and the rate is made for it."""
    made = _any(draw, "digits_mlp", "shapes_cnn", "autoencoder")
    scale = float(made.batch_size * (64 if made.data.classes == 0 else 1))
    made.change_loss = lambda _step, loss: loss * scale
    if isinstance(made.optimizer, torch.optim.SGD):
        made.optimizer.param_groups[0]["lr"] /= scale
    return made


def _scale_loss_down(draw: Draw) -> Problem:
    made = _any(draw, "waves", "friedman", "autoencoder", "brackets")
    made.change_loss = lambda _step, loss: loss * 1e-5
    made.optimizer = torch.optim.Adam(
        made.model.parameters(), lr=made.optimizer.param_groups[0]["lr"], eps=1e-14
    )
    return made


def _freeze_layers(draw: Draw) -> Problem:
    """The first layers are frozen on purpose; the optimizer may hold them or not."""
    made = _any(draw, "digits_mlp", "digits_cnn", "shapes_cnn")
    made.steps = 260
    for name, parameter in made.model.named_parameters():
        if name.startswith(("fc0", "conv0")):
            parameter.requires_grad_(False)
    if draw.choice(True, False):
        wanted = [p for p in made.model.parameters() if p.requires_grad]
        made.optimizer = zoo.make_optimizer(draw, wanted)
    return made


def _clip_always(draw: Draw) -> Problem:
    """A recurrent network whose gradients are clipped at nearly every step."""
    made = draw.choice(zoo.make_text_gru, zoo.make_waves)(draw, kind=draw.choice("rnn", "lstm"))
    made.clip = draw.uniform(0.05, 0.3)
    return made


def _drop_out(draw: Draw) -> Problem:
    """Half the units are dropped: the training loss lies above the validation loss."""
    return zoo.make_digits_mlp(draw, activation="relu", dropout=draw.uniform(0.3, 0.5), depth=2)


def _keep_sparse(draw: Draw) -> Problem:
    """Biases below 0 and a mild penalty: most activations are 0, and it learns well."""
    made = zoo.make_digits_mlp(draw, activation="relu", depth=2)
    with torch.no_grad():
        for name in ("fc0", "fc1"):
            made.model.get_submodule(name).bias.fill_(-draw.uniform(0.2, 0.4))
    return made


def _meet_bad_batch(draw: Draw) -> Problem:
    """One batch with wrong labels; the training is over it in a few steps."""
    made = _any(draw, "digits_mlp", "digits_cnn", "shapes_cnn", "brackets")
    made.clip = 1.0
    bad, shift = draw.onset_step(made.steps), 1

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, (y + shift) % made.data.classes if step == bad else y

    made.change_batch = spoil
    return made


def _smooth_labels(draw: Draw) -> Problem:
    made = _any(draw, "digits_mlp", "digits_cnn", "table")
    share = draw.uniform(0.05, 0.2)
    made.loss = lambda output, target: functional.cross_entropy(
        output, target, label_smoothing=share
    )
    return made


def _weigh_classes(draw: Draw) -> Problem:
    """Few samples of some classes, with weights for them."""
    shares = (0.5, 0.25, 0.15, 0.06, 0.04)
    data = datasets.load_blobs(draw.stream("data"), classes=5, shares=shares, count=1600)
    model = make_mlp([20, 32, 32, 5], activation=draw.choice("relu", "silu"))
    weight = torch.tensor([1.0 / share for share in shares])
    weight = weight / weight.mean()
    return Problem(
        model,
        zoo.make_optimizer(draw, model.parameters(), "adam", factor=0.5),
        data,
        lambda output, target: functional.cross_entropy(output, target, weight=weight),
        draw.stream("order"),
        batch_size=48,
        steps=200,
        accuracy=True,
    )


def _take_tiny_batches(draw: Draw) -> Problem:
    made = _any(draw, "digits_mlp", "friedman", "spirals", "autoencoder")
    made.batch_size, made.steps = draw.choice(2, 3, 4), 500
    for group in made.optimizer.param_groups:
        group["lr"] *= 0.3
    return made


def _normalise_batches(draw: Draw) -> Problem:
    if draw.choice(True, False):
        return zoo.make_digits_mlp(draw, norm=True)
    return draw.choice(zoo.make_digits_cnn, zoo.make_shapes_cnn)(draw, norm=True)


def _decay_weights(draw: Draw) -> Problem:
    """Strong weight decay from large weights: their norm falls all the time."""
    made = zoo.make_digits_mlp(draw, depth=2)
    made.optimizer = torch.optim.AdamW(
        made.model.parameters(), lr=0.003, weight_decay=draw.uniform(0.3, 1.5)
    )
    return made


class _Quiet(nn.Module):
    """A layer whose outputs are tiny by design, beside a path of the usual size."""

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


def _whisper(draw: Draw) -> Problem:
    made = zoo.make_digits_mlp(draw, activation="gelu", depth=2)
    width = made.model.get_submodule("fc0").out_features
    made.model.get_submodule("fc0").weight.data.mul_(0.1)
    quiet = _Quiet(width, 10.0 ** draw.uniform(-3.0, -1.5))
    made.model.act1 = nn.Sequential(nn.GELU(), quiet)
    made.optimizer = zoo.make_optimizer(draw, made.model.parameters(), "adam")
    return made


def _average_weights(draw: Draw) -> Problem:
    """An average of the weights is kept in a copy beside the model."""
    made = _any(draw, "digits_mlp", "digits_cnn", "waves", "residual")
    average = copy.deepcopy(made.model)

    def blend(_step: int) -> None:
        with torch.no_grad():
            for kept, now in zip(average.parameters(), made.model.parameters(), strict=True):
                kept.lerp_(now, 0.02)

    made.after = blend
    return made


def _log_little(draw: Draw) -> Problem:
    """Metrics only, under the other conventional keys."""
    made = _any(draw, "digits_mlp", "table", "friedman", "text_gru", "brackets", "spirals")
    made.loss_key, made.val_key = "training/loss", "validation"
    made.start = {"layers": False, "parameters": False, "timing": "none"}
    return made


def _log_no_parameters(draw: Draw) -> Problem:
    made = _any(draw, "digits_cnn", "shapes_cnn", "text_transformer", "adding")
    made.start = {"parameters": False}
    return made


def _train(make: Make, gain: float, recorder: Recorder, draw: Draw) -> Truth:
    trace = train(make(draw), recorder, draw)
    return judge_healthy(trace, gain=gain, reason=draw.name.rpartition("/")[2])


def _healthy(name: str, make: Make, gain: float = 0.3) -> Scenario:
    return Scenario(name=f"first/healthy/{name}", kind="healthy", train=partial(_train, make, gain))


SCENARIOS = (
    *(_healthy(f"plain_{name}", make) for name, make in zoo.ZOO.items()),
    _healthy("scaler", _scale_up),
    _healthy("accumulation", _accumulate),
    _healthy("warm_restarts", _restart_warm),
    _healthy("warm_up", _warm_up_and_anneal),
    _healthy("rate_to_zero", _drop_rate),
    _healthy("curriculum", _teach_harder),
    _healthy("fine_tuning", _tune_finely, gain=-0.05),
    _healthy("raw_targets", _use_raw_targets),
    _healthy("sum_loss", _sum_loss),
    _healthy("small_loss", _scale_loss_down),
    _healthy("frozen", _freeze_layers),
    _healthy("clipped", _clip_always),
    _healthy("dropout", _drop_out),
    _healthy("sparse", _keep_sparse),
    _healthy("bad_batch", _meet_bad_batch),
    _healthy("label_smoothing", _smooth_labels),
    _healthy("imbalance", _weigh_classes),
    _healthy("tiny_batches", _take_tiny_batches),
    _healthy("batch_norm", _normalise_batches),
    _healthy("weight_decay", _decay_weights),
    _healthy("tiny_outputs", _whisper),
    _healthy("averaged", _average_weights),
    _healthy("metrics_only", _log_little),
    _healthy("no_parameters", _log_no_parameters),
)
