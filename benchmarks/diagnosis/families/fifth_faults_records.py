"""Faults in how the loop is written, and in how fast it goes."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import (
    Plan,
    expect,
    run,
    run_both,
    tell,
)
from benchmarks.diagnosis.families.fifth_recipes import clicks, documents, keywords
from benchmarks.diagnosis.families.fifth_tasks import (
    Documents,
    KeywordNet,
    Parts,
    make_documents,
    make_keywords,
)
from benchmarks.diagnosis.oracles import doubt, is_worse
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth

_DULL = (
    "stagnant_layers",
    "vanishing_gradients",
    "plateau",
    "update_ratio",
    "activation_collapse",
    "overfitting_onset",
)


# pytorch/examples #387, facebookresearch/mmf #1166: most of a step waits for its batch.
def make_starved(draw: Draw, broken: bool) -> Plan:
    """Batches come slower than they are computed."""
    plan = clicks(draw)
    rng = draw.stream("clock")
    compute = draw.log_uniform(30.0, 200.0)
    share = 1.2 + 1.8 * draw.severity if broken else 0.05

    def times(_step: int) -> tuple[float, float, float]:
        worked = compute * float(rng.lognormal(0.0, 0.05))
        waited = compute * share * float(rng.lognormal(0.0, 0.2))
        return worked + waited, waited, worked

    plan.times = times
    return plan


# pytorch #15849, mmpose #923: the workers of the loader are started anew every epoch.
def make_restarts(draw: Draw, broken: bool) -> Plan:
    """The first batch of every epoch waits for the workers."""
    plan = documents(draw, Documents(draw.integer(16, 24)))
    rng = draw.stream("clock")
    compute = draw.log_uniform(40.0, 150.0)
    stall = compute * plan.per_epoch * (0.9 + 0.9 * draw.severity)

    def times(step: int) -> tuple[float, float, float]:
        worked = compute * float(rng.lognormal(0.0, 0.04))
        waited = 0.05 * compute * float(rng.lognormal(0.0, 0.1))
        if broken and step % plan.per_epoch == 0:
            waited += stall * float(rng.lognormal(0.0, 0.05))
        return worked + waited, waited, worked

    plan.times = times
    return plan


def _train_slow(recorder: Recorder, draw: Draw, *, restarts: bool) -> Truth:
    torch.manual_seed(draw.torch_seed)
    plan = (make_restarts if restarts else make_starved)(draw.again(), True)
    assert plan.times is not None
    clock, waited, spent = plan.times, [0.0], [0.0]

    def times(step: int) -> tuple[float, float, float]:
        whole, data, compute = clock(step)
        waited.append(data)
        spent.append(whole)
        return whole, data, compute

    plan.times = times
    run(plan, recorder, draw)
    share = sum(waited) / sum(spent)
    told = f"waits for data {share:.0%} of the time"
    if share < 0.4:
        return doubt(told)
    return expect("runtime_bottleneck_risk", told, onset=0, tolerated=("idle_device",))


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


# Lightning's and HF's accumulation issues: the index starts anew in each epoch, which is
# shorter than the accumulation, and the optimizer's turn never comes.
def make_accumulated(draw: Draw, broken: bool) -> Plan:
    """Gradients of several batches make a step, or would."""
    plan = documents(draw, Documents(draw.integer(20, 28)), rate=1e-2, steps=280)
    count = plan.per_epoch + draw.integer(2, 20) if broken else 4

    def update(step: int, loss: Tensor) -> None:
        place = step % plan.per_epoch
        if not broken and place == 0:
            plan.optimizer.zero_grad()
        (loss / count).backward()
        if (place + 1) % count == 0:
            plan.optimizer.step()
            plan.optimizer.zero_grad()

    plan.update = update
    return plan


def _train_accumulated(recorder: Recorder, draw: Draw) -> Truth:
    _, trace, twin = run_both(make_accumulated, recorder, draw)
    moved = max(trace.moved(name) for name in trace.first)
    told = f"the accumulation is never full; moved by {moved:.2g}; twin {tell(twin)}"
    if moved > 0 or not is_worse(trace, twin):
        return doubt(told)
    allowed = (*_DULL, "gradients_not_cleared", "exploding_gradients", "parameters_not_optimized")
    return expect("optimizer_not_stepping", told, onset=0, tolerated=allowed)


# TrainCheck's stackoverflow-60335387 (OSDI'25): zero_grad() is missing; the pair's fixed half
# is `fifth/healthy/zero_grad_there`.
def make_cleared(draw: Draw, broken: bool) -> Plan:
    """A convolutional net on spectrograms, as the MNIST example's loop."""
    model = KeywordNet(draw.integer(16, 24))
    rate = draw.uniform(0.02, 0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    plan = keywords(draw, model, optimizer=optimizer)

    def update(_step: int, loss: Tensor) -> None:
        if not broken:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    plan.update = update
    return plan


def _train_uncleared(recorder: Recorder, draw: Draw) -> Truth:
    _, trace, twin = run_both(make_cleared, recorder, draw)
    told = f"gradients are never cleared; {tell(trace)}, twin {tell(twin)}"
    if not is_worse(trace, twin, 0.1):
        return doubt(told)
    allowed = (*_DULL, "exploding_gradients", "loss_spike", "divergence")
    return expect("gradients_not_cleared", told, onset=0, tolerated=allowed)


# transformers #33844 (TrainCheck) and DA-RNN #30: dropout is active in evaluation.
def make_evaluated(draw: Draw, broken: bool) -> Plan:
    """model.eval() is forgotten before validation."""
    dropout = 0.45 + 0.2 * draw.severity
    plan = documents(draw, Documents(32, dropout=dropout), rate=4e-3)
    plan.evaluates = not broken
    return plan


def _train_unevaluated(recorder: Recorder, draw: Draw) -> Truth:
    plan, trace, _ = run_both(make_evaluated, recorder, draw)
    assert plan.held_out is not None
    parts = make_documents(draw.again().stream("data"))
    with torch.no_grad():
        plan.model.train()
        noisy = [
            float(functional.cross_entropy(plan.model(parts.val_x), parts.val_y)) for _ in range(9)
        ]
        plan.model.eval()
        clean = float(functional.cross_entropy(plan.model(parts.val_x), parts.val_y))
    mean = sum(noisy) / len(noisy)
    told = f"dropout in validation: {mean:.3g}, without it {clean:.3g}; {tell(trace)}"
    if mean < 1.1 * clean:
        return doubt(told)
    allowed = ("overfitting_onset", "plateau")
    return expect("training_mode_in_evaluation", told, onset=0, tolerated=allowed)


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


SCENARIOS = (
    Scenario(
        name="fifth/runtime_bottleneck_risk/starved",
        kind="fault",
        train=lambda recorder, draw: _train_slow(recorder, draw, restarts=False),
    ),
    Scenario(
        name="fifth/runtime_bottleneck_risk/worker_restarts",
        kind="fault",
        train=lambda recorder, draw: _train_slow(recorder, draw, restarts=True),
    ),
    Scenario(
        name="fifth/parameters_not_optimized/unfrozen_too_late",
        kind="fault",
        train=_train_unfrozen,
    ),
    Scenario(
        name="fifth/optimizer_not_stepping/accumulation_never_full",
        kind="fault",
        train=_train_accumulated,
    ),
    Scenario(
        name="fifth/gradients_not_cleared/zero_grad_missing", kind="fault", train=_train_uncleared
    ),
    Scenario(
        name="fifth/training_mode_in_evaluation/eval_forgotten",
        kind="fault",
        train=_train_unevaluated,
    ),
    Scenario(name="fifth/mostly_frozen/norms_only", kind="fault", train=_train_frozen),
    Scenario(name="fifth/constant_inputs/silence", kind="fault", train=_train_silent),
)
