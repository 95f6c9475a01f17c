"""Faults of the seventh family in what is computed: losses, layers, modes, games, graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.clocks import StepClock
from benchmarks.diagnosis.families.seventh_course import (
    FALLOUT,
    Batch,
    Log,
    Plan,
    fault,
    pursue,
)
from benchmarks.diagnosis.families.seventh_faults_data import is_stuck
from benchmarks.diagnosis.families.seventh_games import bandit, judge_centres
from benchmarks.diagnosis.families.seventh_ranks import train_ranks
from benchmarks.diagnosis.families.seventh_tasks import (
    Decoder,
    Graph,
    digits,
    draw_graph,
    learn,
    make_dense,
    shapes,
    text,
)
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def _look_ahead(draw: Draw, faulty: bool) -> Plan:
    # Training without the causal mask; validation decodes with it.
    plan = text(draw)

    def loss(model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        del step
        assert isinstance(model, Decoder)
        seen = torch.zeros_like(model.future) if faulty else model.future
        output = model(batch[0], seen)
        return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()), {}

    plan.loss = loss
    return plan


def _swap_the_momentum(draw: Draw, faulty: bool) -> Plan:
    # A share of the old in one framework is a share of the new in another: 0.9999 became 1e-4.
    plan = shapes(draw, norm=True)
    build = plan.build
    shift, spread = draw.uniform(1.5, 2.5), draw.uniform(2.0, 3.0)

    class Raw(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * spread + shift)

    def built() -> nn.Module:
        model = build()
        for module in model.modules():
            if faulty and isinstance(module, nn.BatchNorm2d):
                module.momentum = 1e-4
        return Raw(model)

    plan.build = built
    return plan


def _smooth_the_graph(draw: Draw, faulty: bool) -> Plan:
    adjacency, x, y = draw_graph(draw.stream("graph"))
    depth, width = draw.integer(12, 16) if faulty else 1, draw.integer(14, 20)
    parts = torch.from_numpy(draw.stream("parts").permutation(len(x))).split([80, 60, 100])
    rate = draw.uniform(5e-3, 1e-2)

    def lose(model: nn.Module, rows: Tensor) -> Tensor:
        return functional.cross_entropy(model(x)[rows], y[rows])

    return Plan(
        build=lambda: Graph(adjacency, [12, *[width] * depth, 4]),
        optimize=lambda model: torch.optim.Adam(model.parameters(), lr=rate, weight_decay=5e-4),
        batch=lambda step: (x, y, parts[0]),  # noqa: ARG005
        loss=lambda model, batch, step: (lose(model, batch[2]), {}),  # noqa: ARG005
        val=lambda model: {"val/loss": float(lose(model, parts[1]))},
        proof=lambda model: float((model(x).argmax(1) != y)[parts[2]].double().mean()),
        steps=140,
        val_every=10,
        epoch_steps=1,
    )


class _Quantized(nn.Module):
    """An autoencoder with a code book; without `straight` nothing reaches the encoder."""

    def __init__(self, width: int, codes: int, *, straight: bool):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))
        self.book = nn.Embedding(codes, 4)
        self.decoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 64))
        self.straight = straight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).view(len(x), 2, 4)
        near = torch.cdist(code.detach(), self.book.weight[None].expand(len(x), -1, -1)).argmin(2)
        found = self.book(near)
        cost = (found - code.detach()).square().mean()
        if self.straight:
            cost = cost + 0.25 * (code - found.detach()).square().mean()
            found = code + (found - code).detach()
        else:
            found = found.detach()
        return self.decoder(found.flatten(1)), cost


def _cut_at_the_code_book(draw: Draw, faulty: bool) -> Plan:
    data = datasets.load_digits(draw.stream("data")).flatten()
    width, codes = draw.integer(40, 64), draw.integer(24, 32)

    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        del y
        made, cost = model(x)
        return functional.mse_loss(made, x) * 10 + cost

    def judge(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        del y
        return functional.mse_loss(model(x)[0], x) * 10

    return learn(
        draw,
        data,
        lambda: _Quantized(width, codes, straight=not faulty),
        lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        lose=lose,
        judge=judge,
        steps=300,
    )


def _still(log: Log, twin: Log) -> str | None:
    moved, other = log.moved("encoder"), twin.moved("encoder")
    return None if moved < 0.01 * other else f"the encoder moved by {moved:.3g}"


def _freeze_all_but_the_head(draw: Draw, faulty: bool) -> Plan:
    # A list of names to train, from a fine-tuning recipe, in a training from scratch.
    plan = text(draw)

    def arrange(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not faulty or name.startswith("head"))

    plan.arrange = arrange
    return plan


def _feed_bytes(draw: Draw, faulty: bool) -> Plan:
    # Images of 0 to 255 at a rate for 0 to 1.
    width = draw.integer(32, 56)
    scale = 255.0 if faulty else 1.0

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_dense([64, width, width, width, 10])

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.clamp(min=0) * scale)

    return digits(
        draw,
        build=Bytes,
        optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        # As in the literature, the explosion is over after a step or two.
        clip=50.0,
    )


def _is_dead(log: Log, twin: Log) -> str | None:
    del twin
    net = log.model.get_submodule("net")
    x = torch.rand(200, 64) * 255
    least = 1.0
    with torch.no_grad():
        for module in net.children():
            x = module(x)
            if isinstance(module, nn.ReLU):
                least = min(least, float((x.amax(0) > 0).double().mean()))
    return None if least < 0.2 else f"{least:.2f} of the units of each layer live"


def _climb_the_wrong_way(draw: Draw, faulty: bool) -> Plan:
    return bandit(draw, sign=-1.0 if faulty else 1.0)


def _mine_the_hardest(draw: Draw, faulty: bool) -> Plan:
    data = datasets.load_digits(draw.stream("data"), noise=0.3).flatten()
    width = draw.integer(32, 48)
    margin = draw.uniform(0.2, 0.4)

    def lose(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        code = model(x)
        apart = torch.cdist(code, code).square()
        same = y[:, None] == y[None]
        if faulty:
            far = apart.masked_fill(~same, -1e9).amax(1)
            near = apart.masked_fill(same, 1e9).amin(1)
            return (far - near + margin).relu().mean()
        each = (apart[:, :, None] - apart[:, None, :] + margin).relu()
        counted = (same[:, :, None] & ~same[:, None, :]).float()
        return (each * counted).sum() / counted.sum()

    return learn(
        draw,
        data,
        lambda: make_dense([64, width, width, 8]),
        lambda model: torch.optim.Adam(model.parameters(), lr=2e-2),
        lose=lose,
        judge=lambda model, x, y: judge_centres(model, data.x, data.y, x, y),
        val=lambda model: {"val/loss": float(lose(model, data.val_x[:64], data.val_y[:64]))},
    )


def _starve(recorder: Recorder, draw: Draw) -> Truth:
    # num_workers=0 and a decoder in Python.
    compute = draw.log_uniform(8.0, 60.0)
    clock = StepClock(
        draw.stream("clock"),
        compute_ms=compute,
        data_ms=compute * draw.uniform(2.0, 5.0),
        noise=0.1,
    )
    torch.manual_seed(draw.torch_seed)
    log = pursue(shapes(draw.again(), start={"timing": clock}), recorder)
    share = clock.data_ms / (clock.data_ms + compute)
    return Truth(
        kind="fault",
        expected=("runtime_bottleneck_risk",),
        reason=f"{100 * share:.0f} % of the time is waiting for data; {log.tell()}",
    )


def _bypass_the_wrapper(recorder: Recorder, draw: Draw) -> Truth:
    made = train_ranks(recorder, draw, "bare")
    told = f"ranks apart by {made['apart']:.3g}, loss {made['first']:.3g} -> {made['end']:.3g}"
    if made["apart"] < 0.05 or made["end"] < 1.0:
        return doubt(told)
    tolerated = (*FALLOUT, "unshuffled_data", "mislabelled_data")
    return Truth(kind="fault", expected=("replicas_differ",), tolerated=tolerated, reason=told)


def _share_a_slow_disk(recorder: Recorder, draw: Draw) -> Truth:
    made = train_ranks(recorder, draw, "slow")
    told = f"data of rank 1 took {made['slow']:.1f} ms, of rank 0 {made['quick']:.1f} ms"
    if made["slow"] < 3 * made["quick"]:
        return doubt(told)
    tolerated = ("runtime_bottleneck_risk", "plateau")
    return Truth(kind="fault", expected=("straggler_rank",), tolerated=tolerated, reason=told)


SCENARIOS = (
    fault("seventh/models/looks_ahead", _look_ahead),
    fault("seventh/models/slow_running_averages", _swap_the_momentum),
    fault("seventh/models/smoothed_graph", _smooth_the_graph),
    fault(
        "seventh/models/cut_at_the_code_book",
        _cut_at_the_code_book,
        "stagnant_layers",
        tolerated=(*FALLOUT, "parameters_not_optimized"),
        culprits=("encoder", "encoder.0", "encoder.2"),
        check=_still,
        share=0.15,
    ),
    fault(
        "seventh/models/frozen_from_scratch",
        _freeze_all_but_the_head,
        "mostly_frozen",
        share=0.15,
    ),
    fault(
        "seventh/models/bytes_for_shares",
        _feed_bytes,
        "activation_collapse",
        tolerated=(*FALLOUT, "non_finite_values"),
        check=_is_dead,
    ),
    fault("seventh/models/wrong_sign_of_reward", _climb_the_wrong_way),
    fault("seventh/models/hardest_triplets", _mine_the_hardest, "plateau", check=is_stuck(0.25)),
    Scenario(name="seventh/fault/machines/starved", kind="fault", train=_starve),
    Scenario(
        name="seventh/fault/machines/wrapper_bypassed", kind="fault", train=_bypass_the_wrapper
    ),
    Scenario(name="seventh/fault/machines/slow_disk", kind="fault", train=_share_a_slow_disk),
)
