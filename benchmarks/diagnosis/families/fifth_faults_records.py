"""Faults in how the loop is written, and in how fast it goes."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import (
    Plan,
    expect,
    run_both,
    tell,
)
from benchmarks.diagnosis.families.fifth_recipes import documents, keywords
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


SCENARIOS = (
    Scenario(
        name="fifth/parameters_not_optimized/unfrozen_too_late",
        kind="fault",
        train=_train_unfrozen,
    ),
    Scenario(name="fifth/mostly_frozen/norms_only", kind="fault", train=_train_frozen),
    Scenario(name="fifth/constant_inputs/silence", kind="fault", train=_train_silent),
)
