"""Faults of the fifth family; each names the account that it was written from."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import (
    Make,
    Plan,
    excess,
    expect,
    is_worse,
    make_wrong,
    run,
    run_both,
    tell,
)
from benchmarks.diagnosis.families.fifth_games import play_poles
from benchmarks.diagnosis.families.fifth_recipes import (
    documents,
    keywords,
    match,
    next_letter,
    ratings,
    reversals,
    series,
    text,
    utterances,
)
from benchmarks.diagnosis.families.fifth_tasks import (
    CausalText,
    Documents,
    Forecaster,
    KeywordNet,
    Parts,
    make_documents,
    make_keywords,
    make_ratings,
    make_series,
)
from benchmarks.diagnosis.measuring import doubt, smooth
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


# Pascanu et al. 2013, Le et al. 2015: the recurrent matrix of rectifiers is above norm 1, and
# what comes back over 48 hours grows with each of them, from the first step on.
def make_unclipped(draw: Draw, broken: bool) -> Plan:
    """A recurrent network of rectifiers on windows of 48 hours."""
    model = Forecaster("relu", draw.integer(20, 28))
    with torch.no_grad():
        size = len(model.rnn.weight_hh_l0)
        gain = 1.1 + 0.08 * draw.severity if broken else 1.0
        model.rnn.weight_hh_l0.copy_(gain * torch.eye(size))
    parts = make_series(draw.stream("data"), window=48)
    plan = series(draw, model, parts=parts, rate=1.5e-3, steps=200)
    plan.clip = None if broken else 1.0
    return plan


# Stack Overflow's "loss becomes huge, then nan" of unscaled features (DeepFD, Humbatova et
# al. 2020: missing normalisation): a linear forecaster on megawatts.
def make_lags(draw: Draw, broken: bool) -> Plan:
    """A linear model of 24 lags, scaled or as they were measured."""
    parts = make_series(draw.stream("data"))
    growth = 0.03 + 0.05 * draw.severity
    if broken:
        parts = Parts(*(10.0 * part + 30.0 for part in _list_parts(parts)))
        flat = parts.x.flatten(1).double()
        steepest = 2.0 * float(torch.linalg.eigvalsh(flat.T @ flat / len(flat))[-1])
        rate = (2.0 + growth) / steepest
    else:
        rate = 0.01
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return series(draw, model, parts=parts, optimizer=optimizer, steps=220)


def _list_parts(parts: Parts) -> list[Tensor]:
    return [parts.x, parts.y, parts.val_x, parts.val_y, parts.proof_x, parts.proof_y]


def _explode(make: Make, fault: str, *, at_once: bool) -> Scenario:
    def train(recorder: Recorder, draw: Draw) -> Truth:
        _, trace, twin = run_both(make, recorder, draw)
        probed = np.array(trace.gradients[:: recorder.every])
        finite = probed[np.isfinite(probed)]
        start = float(np.median(trace.gradients[:3]))
        usual = float(np.median(twin.gradients)) if at_once else start
        above = int((finite > 50 * usual).sum())
        told = f"{fault}; gradient {start:.3g} -> {finite.max():.3g}, usual {usual:.3g}"
        if above < 2:
            return doubt(f"{told}: only {above} probes above 50 times that")
        if not is_worse(trace, twin):
            return doubt(f"{told}: no harm done: {tell(trace)}, twin {tell(twin)}")
        onset = next(step for step, value in enumerate(trace.gradients) if not value <= 10 * usual)
        return expect("exploding_gradients", told, onset=onset)

    name = make.__name__.removeprefix("make_")
    return Scenario(name=f"fifth/exploding_gradients/{name}", kind="fault", train=train)


# Humbatova et al. 2020 and DeepFD: sigmoids in every hidden layer.
def make_sigmoid_stack(draw: Draw, broken: bool) -> Plan:
    """Eight hidden layers over mean word vectors."""
    depth, width = draw.integer(7, 9), draw.integer(20, 28)
    kind = nn.Sigmoid if broken else nn.GELU
    return documents(draw, Documents(width, depth=depth, activation=kind, norm=not broken))


class _Shares(nn.Softmax):
    def __init__(self) -> None:
        super().__init__(dim=-1)


# DeepFD's and AUTOTRAINER's Stack Overflow cases: softmax as hidden activation.
def make_hidden_softmax(draw: Draw, broken: bool) -> Plan:
    """Softmax between the layers."""
    depth, width = draw.integer(4, 5), draw.integer(24, 32)
    kind: type[nn.Module] = _Shares if broken else nn.ReLU
    return documents(draw, Documents(width, depth=depth, activation=kind))


def _vanish(make: Make, fault: str) -> Scenario:
    def train(recorder: Recorder, draw: Draw) -> Truth:
        _, trace, twin = run_both(make, recorder, draw)
        first, last = (
            float(np.median(trace.layer_gradients[name]))
            for name in ("body.fc0.weight", "head.weight")
        )
        told = f"{fault}; gradient of body.fc0 {first:.2g}, of head {last:.2g}; {tell(trace)}"
        if not first < 1e-4 * last:
            return doubt(f"{told}: it reaches the first layer")
        if not is_worse(trace, twin):
            return doubt(f"{told}: no harm done")
        allowed = ("stagnant_layers", "activation_collapse", "plateau", "update_ratio")
        culprits = (*(f"body.fc{place}" for place in range(4)), "embed")
        return expect("vanishing_gradients", told, culprits=culprits, onset=0, tolerated=allowed)

    name = make.__name__.removeprefix("make_")
    return Scenario(name=f"fifth/vanishing_gradients/{name}", kind="fault", train=train)


# PyTorch forum, "encoder does not train": states pass through .detach() (or .data).
def make_detached(draw: Draw, broken: bool) -> Plan:
    """The decoder reads states of which no gradient comes back."""
    return reversals(draw, cut=broken)


# Discriminative rates of fine-tuning (ULMFiT, HF examples): the rate of the lowest group is
# rounded to 0 (`lr // 10 ** depth`).
def make_group_rate_zero(draw: Draw, broken: bool) -> Plan:
    """The embedding's group has no learning rate."""
    model = Documents(draw.integer(20, 28))
    rate = 5e-3 * draw.uniform(0.7, 1.4)
    groups = [
        {"params": model.embed.parameters(), "lr": 0.0 if broken else rate / 2},
        {"params": model.body.parameters(), "lr": rate / 2},
        {"params": model.head.parameters(), "lr": rate},
    ]
    return documents(draw, model, optimizer=torch.optim.Adam(groups))


def _still(make: Make, layers: tuple[str, ...], fault: str) -> Scenario:
    def train(recorder: Recorder, draw: Draw) -> Truth:
        _, trace, twin = run_both(make, recorder, draw)
        names = [name for name in trace.first if name.startswith(layers)]
        moved, usual = (max(kind.moved(name) for name in names) for kind in (trace, twin))
        told = f"{fault}; {', '.join(layers)} moved by {moved:.2g}, in the twin by {usual:.2g}"
        if moved > 0 or usual < 0.05:
            return doubt(told)
        allowed = ("vanishing_gradients", "plateau", "update_ratio", "overfitting_onset")
        return expect("stagnant_layers", told, culprits=layers, onset=0, tolerated=allowed)

    name = make.__name__.removeprefix("make_")
    return Scenario(name=f"fifth/stagnant_layers/{name}", kind="fault", train=train)


# Speech toolkits' issues on int16 audio that nobody scaled to -1 ... 1.
def make_raw_amplitudes(draw: Draw, broken: bool) -> Plan:
    """Sounds as 16 bit numbers into tanh."""
    model = KeywordNet(draw.integer(16, 24), norm=False, activation=nn.Tanh)
    scale = 1000.0 + 3000.0 * draw.severity if broken else 1.0
    return keywords(draw, model, parts=make_keywords(draw.stream("data"), scale=scale))


def _collapse(make: Make, fault: str) -> Scenario:
    def train(recorder: Recorder, draw: Draw) -> Truth:
        plan, trace, twin = run_both(make, recorder, draw)
        shares = _measure_lost_units(plan, draw)
        worst = max(shares, key=lambda name: shares[name])
        told = f"{fault}; lost units {', '.join(f'{k} {v:.2f}' for k, v in shares.items())}"
        if shares[worst] < 0.9:
            return doubt(f"{told}; {tell(trace)}")
        if not is_worse(trace, twin, 0.1):
            return doubt(f"{told}; no harm done: {tell(trace)}, twin {tell(twin)}")
        culprits = tuple(name for name, share in shares.items() if share >= 0.8)
        feeding = {"act0": "conv0", "act1": "conv1", "act2": "fc"}
        culprits = (*culprits, *(feeding[name] for name in culprits))
        return expect("activation_collapse", told, culprits=culprits, onset=0)

    name = make.__name__.removeprefix("make_")
    return Scenario(name=f"fifth/activation_collapse/{name}", kind="fault", train=train)


def _measure_lost_units(plan: Plan, draw: Draw) -> dict[str, float]:
    """Share of each activation's outputs at an end: 0 of a rectifier, 1 of a tanh."""
    model = plan.model
    assert isinstance(model, KeywordNet)
    sounds = make_keywords(draw.stream("lost"), count=200).x
    if isinstance(model.act0, nn.Tanh):
        sounds = sounds * 2000.0
    shares: dict[str, float] = {}
    with torch.no_grad():
        x = sounds
        for name, layer in (("act0", model.conv0), ("act1", model.conv1)):
            x = model.act0(layer(x))
            shares[name] = _count_ends(x, model.act0)
        x = model.act2(model.fc(x.amax(2)))
        shares["act2"] = _count_ends(x, model.act2)
    return shares


def _count_ends(x: Tensor, act: nn.Module) -> float:
    if isinstance(act, nn.Tanh):
        return float((x.abs() > 0.99).float().mean())
    units = x.transpose(0, 1).flatten(1)
    return float((units.amax(1) <= 0).float().mean())


# Recommender courses' first lesson: many factors, few ratings, no regularisation.
def make_few_ratings(draw: Draw, _broken: bool) -> Plan:
    """Noisy ratings, and twice as many numbers to fit them."""
    parts = make_ratings(draw.stream("data"), count=2500, noise=1.0)
    return ratings(draw, parts=parts, rank=draw.integer(12, 20), steps=280)


# HF forum, "eval_loss goes up after epoch 2" on small corpora.
def make_few_documents(draw: Draw, _broken: bool) -> Plan:
    """Eighty documents, many epochs, logged once an epoch."""
    parts = make_documents(draw.stream("data"), blur=0.8)
    few = Parts(parts.x[:80], parts.y[:80], parts.val_x, parts.val_y, parts.proof_x, parts.proof_y)
    plan = documents(draw, Documents(32), parts=few, rate=6e-3, steps=250, size=16)
    plan.by_epoch = True
    plan.key = draw.choice("train_loss_epoch", "loss")
    return plan


def _overfit(make: Make, fault: str) -> Scenario:
    def train(recorder: Recorder, draw: Draw) -> Truth:
        torch.manual_seed(draw.torch_seed)
        trace = run(make(draw.again(), True), recorder, draw)
        rise = excess(trace)
        half = len(trace.losses) // 2
        early, late = np.mean(trace.losses[:half]), np.mean(trace.losses[half:])
        told = f"{fault}; oracle {tell(trace)}, training {early:.3g} -> {late:.3g}"
        lost = (trace.proof[-1] - min(trace.proof)) / (trace.proof[0] - min(trace.proof))
        if not (0.15 < rise < math.inf and lost > 0.3 and late < 0.7 * early):
            return doubt(f"{told}: rose by {rise:.2f}")
        onset = trace.looks[int(np.argmin(smooth(trace.proof)))]
        allowed = ("plateau", "mislabelled_data", "divergence")
        return expect("overfitting_onset", told, onset=onset, tolerated=allowed)

    name = make.__name__.removeprefix("make_")
    return Scenario(name=f"fifth/overfitting_onset/{name}", kind="fault", train=train)


# wenet #2299 and PyTorch's CTCLoss: an utterance with fewer frames than symbols is infinite.
def make_spoken(draw: Draw, broken: bool) -> Plan:
    """A few utterances that cannot be aligned."""
    return utterances(draw, short=0.006 + 0.01 * draw.severity, safe=not broken)


def _train_infinite(recorder: Recorder, draw: Draw) -> Truth:
    torch.manual_seed(draw.torch_seed)
    plan = make_spoken(draw.again(), True)
    trace = run(plan, recorder, draw)
    bad = [step for step, value in enumerate(trace.losses) if not math.isfinite(value)]
    lost = any(not bool(torch.isfinite(p).all()) for p in plan.model.parameters())
    told = f"CTC of too few frames; {len(bad)} losses not finite, weights not finite: {lost}"
    if not (bad and lost):
        return doubt(told)
    return expect("non_finite_values", told, onset=bad[0])


def _plain(name: str, train: object) -> Scenario:
    return Scenario(name=f"fifth/{name}", kind="fault", train=train)  # type: ignore[arg-type]


_DULL = (
    "stagnant_layers",
    "vanishing_gradients",
    "plateau",
    "update_ratio",
    "activation_collapse",
    "overfitting_onset",
)


def pretrain(
    model: Documents, draw: Draw, parts: Parts, steps: int = 80, *, classes: int = 2
) -> None:
    """Teach the embedding and the body another question, before the run begins."""
    rng = draw.stream("pretraining")
    question = nn.Linear(model.head.in_features, classes)
    optimizer = torch.optim.Adam([*model.parameters(), *question.parameters()], lr=5e-3)
    for _ in range(steps):
        chosen = torch.from_numpy(rng.integers(0, len(parts.x), 32))
        output = question(model.body(model.encode(parts.x[chosen])))
        loss = functional.cross_entropy(output, (parts.y[chosen] + 1) % classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# fastai #2133, skorch #261: the optimizer was made of what had a gradient then.
def make_unfrozen(draw: Draw, broken: bool) -> Plan:
    """Embedding and body are unfrozen after a while; the optimizer does not know them."""
    parts = make_documents(draw.stream("data"), blur=0.75)
    model = Documents(draw.integer(20, 28))
    pretrain(model, draw, parts, 25)
    below = [*model.embed.parameters(), *model.body.parameters()]
    for parameter in below:
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=4e-3)
    onset = draw.onset_step(240, 0.15, 0.35)

    def unfreeze(step: int) -> None:
        if step != onset:
            return
        for parameter in below:
            parameter.requires_grad_(True)
        if not broken:
            optimizer.add_param_group({"params": below, "lr": 4e-3})

    plan = documents(draw, model, parts=parts, optimizer=optimizer)
    plan.before = unfreeze
    return plan


def _train_unfrozen(recorder: Recorder, draw: Draw) -> Truth:
    _, trace, twin = run_both(make_unfrozen, recorder, draw)
    moved = max(trace.moved(name) for name in trace.first if name.startswith(("embed", "body")))
    told = f"unfrozen, not in the optimizer; moved by {moved:.2g}; {tell(trace)}, twin {tell(twin)}"
    if moved > 0 or not is_worse(trace, twin, 0.03):
        return doubt(told)
    allowed = (*_DULL, "mostly_frozen", "gradients_not_cleared", "exploding_gradients")
    return expect("parameters_not_optimized", told, culprits=("embed", "body"), tolerated=allowed)


# TrainCheck's pytorch-forum-84911 (OSDI'25): only the batch normalisation is left to train;
# the pair's fixed half is `fifth/healthy/all_trained`.
def make_bare_norms(draw: Draw, broken: bool) -> Plan:
    """Everything without "norm" in its name is frozen, the new head too."""
    model = KeywordNet(draw.integer(16, 24))
    for name, parameter in model.named_parameters():
        if broken and "norm" not in name:
            parameter.requires_grad_(False)
    return keywords(draw, model, rate=4e-3)


def _train_frozen(recorder: Recorder, draw: Draw) -> Truth:
    plan, trace, twin = run_both(make_bare_norms, recorder, draw)
    free = sum(p.numel() for p in plan.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in plan.model.parameters())
    told = f"{free / whole:.1%} of the weights are trained; {tell(trace)}, twin {tell(twin)}"
    if free > 0.1 * whole or not is_worse(trace, twin):
        return doubt(told)
    return expect("mostly_frozen", told, onset=0, tolerated=_DULL)


# Speech toolkits' issues on loaders that return silence for a codec they lack.
def make_silent(draw: Draw, broken: bool) -> Plan:
    """Every sound is zeros."""
    parts = make_keywords(draw.stream("data"))
    if broken:
        parts = Parts(
            parts.x * 0, parts.y, parts.val_x * 0, parts.val_y, parts.proof_x * 0, parts.proof_y
        )
    return keywords(draw, parts=parts)


def _train_silent(recorder: Recorder, draw: Draw) -> Truth:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, trace, twin = run_both(make_silent, recorder, draw)
    told = f"every input is 0; {tell(trace)}, twin {tell(twin)}"
    if not is_worse(trace, twin):
        return doubt(told)
    allowed = (*_DULL, "mislabelled_data")
    return expect("constant_inputs", told, onset=0, tolerated=allowed)


# HF transformers' "labels are shifted inside the model": the collator had shifted them, too.
def make_shifted(draw: Draw, broken: bool) -> Plan:
    """The letter after the next one is learned."""

    def twice(output: Tensor, y: Tensor) -> Tensor:
        return next_letter(output[:, :-1], y[:, 1:])

    return text(draw, criterion=twice if broken else next_letter)


# PyTorch forum's batch_first questions: the batch is read as time.
def make_transposed(draw: Draw, broken: bool) -> Plan:
    """Hours and windows change places in the recurrent network."""
    model = Forecaster("gru", draw.integer(16, 24))
    model.rnn.batch_first = not broken
    return series(draw, model, parts=make_series(draw.stream("data"), ahead=7))


# "Loss goes to zero and generation is garbage" (minGPT and fairseq threads): no causal mask.
def make_unmasked(draw: Draw, broken: bool) -> Plan:
    """Every letter sees the one it is to say."""

    def last(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output[:, -1], y[:, -1])

    model = CausalText(32, 2 * draw.integer(12, 16), 1, causal=not broken)
    return text(draw, model, honest=last)


# Humbatova et al. 2020 (wrong preprocessing): statistics are applied to the training set only.
def make_unscaled_serving(draw: Draw, broken: bool) -> Plan:
    """Held-out sounds keep their own scale."""
    parts = make_keywords(draw.stream("data"))
    factor, offset = draw.uniform(2.5, 5.0), draw.uniform(2.0, 5.0)
    if broken:
        val_x, proof_x = factor * parts.val_x + offset, factor * parts.proof_x + offset
        parts = Parts(parts.x, parts.y, val_x, parts.val_y, proof_x, parts.proof_y)
    return keywords(draw, parts=parts)


# Post-mortems of recommenders: a join by row number gives every pair another's rating.
def make_joined(draw: Draw, broken: bool) -> Plan:
    """Ratings belong to other pairs."""
    parts = make_ratings(draw.stream("data"))
    if broken:
        rng = draw.stream("join")
        y = parts.y[torch.from_numpy(rng.permutation(len(parts.y)))]
        val_y = parts.val_y[torch.from_numpy(rng.permutation(len(parts.val_y)))]
        parts = Parts(parts.x, y, parts.val_x, val_y, parts.proof_x, parts.proof_y)
    return ratings(draw, parts=parts)


# PyTorch's warning of target sizes, and its forum: (N, 1) against (N) becomes (N, N).
def make_broadcast(draw: Draw, broken: bool) -> Plan:
    """Every forecast is compared with every hour."""

    def spread(output: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return functional.mse_loss(output, y)

    return series(draw, criterion=spread if broken else match)


# RoboVerse #814 and many PPO fixes: the value after a fall is that of the restart.
def make_poles(draw: Draw, broken: bool) -> Plan:
    """Falls cost nothing; only the reward is logged."""
    return play_poles(draw, masked=not broken)


SCENARIOS = (
    _explode(make_unclipped, "recurrent gain above 1, no clipping", at_once=True),
    _explode(make_lags, "unscaled megawatts", at_once=False),
    _vanish(make_sigmoid_stack, "sigmoids in eight layers"),
    _vanish(make_hidden_softmax, "softmax between layers"),
    _still(make_detached, ("encoder", "embed"), "detached encoder"),
    _still(make_group_rate_zero, ("embed",), "rate 0 of a group"),
    _collapse(make_raw_amplitudes, "16 bit amplitudes into tanh"),
    _overfit(make_few_ratings, "more factors than ratings"),
    _overfit(make_few_documents, "eighty documents"),
    _plain("non_finite_values/infinite_ctc", _train_infinite),
    Scenario(
        name="fifth/parameters_not_optimized/unfrozen_too_late",
        kind="fault",
        train=_train_unfrozen,
    ),
    Scenario(name="fifth/mostly_frozen/norms_only", kind="fault", train=_train_frozen),
    Scenario(name="fifth/constant_inputs/silence", kind="fault", train=_train_silent),
    make_wrong("labels_shifted_twice", make_shifted, "labels shifted twice"),
    make_wrong("batch_read_as_time", make_transposed, "batch_first is missing"),
    make_wrong("no_causal_mask", make_unmasked, "no causal mask"),
    make_wrong("unscaled_serving", make_unscaled_serving, "held-out data is not scaled"),
    make_wrong("ratings_joined_wrongly", make_joined, "ratings of other pairs"),
    make_wrong("error_of_all_pairs", make_broadcast, "mean over N x N"),
    make_wrong("falls_cost_nothing", make_poles, "bootstrapped across the end of an episode"),
)
