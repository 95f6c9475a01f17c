"""Sound trainings of the fifth family's tasks, which scenarios change where they want to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import Batches, Plan
from benchmarks.diagnosis.families.fifth_tasks import (
    CausalText,
    Clicks,
    Documents,
    Factorizer,
    Forecaster,
    KeywordNet,
    Parts,
    Recognizer,
    Reverser,
    Utterances,
    make_clicks,
    make_documents,
    make_keywords,
    make_ratings,
    make_reversals,
    make_series,
    make_utterances,
)
from benchmarks.diagnosis.scenario import Draw
from benchmarks.diagnosis.sequences import load_text

Criterion = Callable[[Tensor, Tensor], Tensor]
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]
Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def adam(draw: Draw, parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Adam or AdamW with about this rate."""
    made = draw.choice(torch.optim.Adam, torch.optim.AdamW)
    result: torch.optim.Optimizer = made(parameters, lr=rate * draw.uniform(0.7, 1.4))
    return result


def naming(draw: Draw) -> tuple[str, str]:
    """Keys of the training loss and of the validation's, as trainers name them."""
    pair: tuple[str, str] = draw.choice(
        ("train/loss", "val/loss"),
        ("loss", "eval_loss"),
        ("Loss/train", "Loss/validation"),
        ("train_loss", "valid_loss"),
    )
    return pair


def call_plainly(model: nn.Module, x: Tensor, _y: Tensor) -> Tensor:
    """The model's answer to the inputs alone."""
    result: Tensor = model(x)
    return result


def supervise(
    draw: Draw,
    parts: Parts,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion,
    *,
    size: int = 32,
    steps: int = 240,
    keys: tuple[str, str] = ("train/loss", "val/loss"),
    change: Change | None = None,
    honest: Criterion | None = None,
    hits: bool = False,
    shuffled: bool = True,
    call: Call = call_plainly,
) -> Plan:
    """A training on pairs.

    Args:
        draw: Of the order of batches.
        parts: The data.
        model, optimizer, criterion: What is trained with what.
        size: Of batches.
        steps: Of the training.
        keys: Of the losses.
        change: Given step, inputs and targets of a batch, returns others.
        honest: What the oracle measures in place of the criterion.
        hits: Whether the accuracy of validation is logged.
        shuffled: Whether epochs have new orders.
        call: Calls the model.
    """
    batches = Batches(draw.stream("order"), len(parts.x), size, shuffled=shuffled)
    measure = honest or criterion

    def loss(model: nn.Module, step: int) -> Tensor:
        chosen = batches.take(step)
        x, y = parts.x[chosen], parts.y[chosen]
        if change is not None:
            x, y = change(step, x, y)
        return criterion(call(model, x, y), y)

    def judge(model: nn.Module) -> float:
        return float(measure(call(model, parts.proof_x, parts.proof_y), parts.proof_y))

    def held_out(model: nn.Module) -> dict[str, float]:
        output = call(model, parts.val_x, parts.val_y)
        values = {keys[1]: float(criterion(output, parts.val_y))}
        if hits:
            right = (output.argmax(-1) == parts.val_y).float().mean()
            named = keys[1].replace("loss", "accuracy").replace("Loss", "Accuracy")
            values[named] = float(right)
        return values

    return Plan(
        model=model,
        optimizer=optimizer,
        loss=loss,
        judge=judge,
        held_out=held_out,
        steps=steps,
        per_epoch=batches.per_epoch,
        val_every=draw.choice(10, 15, 20),
        key=keys[0],
    )


def ratings(
    draw: Draw,
    *,
    count: int = 5000,
    rank: int = 4,
    tail: float = 0.0,
    steps: int = 280,
    spread: float = 0.1,
    parts: Parts | None = None,
) -> Plan:
    """Matrix factorisation of ratings; the error logged is of the mean square."""
    parts = parts or make_ratings(draw.stream("data"), count=count, tail=tail)
    model = Factorizer(120, 90, rank, spread=spread)
    # Ratings are told from their mean, as users do.
    parts = Parts(
        parts.x, parts.y - 3.0, parts.val_x, parts.val_y - 3.0, parts.proof_x, parts.proof_y - 3.0
    )
    optimizer = adam(draw, model.parameters(), 0.02)
    keys = draw.choice(("train_mse", "val_mse"), ("mse", "val_mse"), ("train/loss", "val/loss"))
    return supervise(
        draw, parts, model, optimizer, functional.mse_loss, size=64, steps=steps, keys=keys
    )


def documents(
    draw: Draw,
    model: Documents,
    *,
    rate: float = 5e-3,
    criterion: Criterion = functional.cross_entropy,
    honest: Criterion = functional.cross_entropy,
    parts: Parts | None = None,
    steps: int = 240,
    size: int = 32,
    change: Change | None = None,
    shuffled: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> Plan:
    """Topics of documents."""
    parts = parts or make_documents(draw.stream("data"))
    return supervise(
        draw,
        parts,
        model,
        optimizer or adam(draw, model.parameters(), rate),
        criterion,
        steps=steps,
        size=size,
        keys=naming(draw),
        honest=honest,
        hits=draw.uniform(0, 1) < 0.5,
        change=change,
        shuffled=shuffled,
    )


def load_letters(draw: Draw, *, length: int = 24, count: int = 900) -> Parts:
    """Windows of text and the letters that follow."""
    data = load_text(draw.stream("data"), length=length, count=count)
    return Parts(data.x, data.y, data.val_x, data.val_y, data.proof_x, data.proof_y)


def next_letter(output: Tensor, y: Tensor) -> Tensor:
    """Cross entropy over all places."""
    return functional.cross_entropy(output.flatten(0, 1), y.flatten())


def text(
    draw: Draw,
    model: nn.Module | None = None,
    *,
    rate: float = 5e-3,
    steps: int = 240,
    optimizer: torch.optim.Optimizer | None = None,
    keys: tuple[str, str] | None = None,
    change: Change | None = None,
    criterion: Criterion = next_letter,
    honest: Criterion = next_letter,
) -> Plan:
    """A small language model of letters."""
    model = model or CausalText(32, 2 * draw.integer(12, 16), 1)
    return supervise(
        draw,
        load_letters(draw),
        model,
        optimizer or adam(draw, model.parameters(), rate),
        criterion,
        size=16,
        steps=steps,
        keys=keys or naming(draw),
        change=change,
        honest=honest,
    )


def transcribe(model: nn.Module, spoken: Utterances, chosen: Tensor, *, safe: bool) -> Tensor:
    """CTC loss of the chosen utterances; `safe` leaves out what cannot be aligned."""
    output = model(spoken.frames[chosen]).transpose(0, 1)
    return functional.ctc_loss(
        output,
        spoken.symbols[chosen],
        spoken.lengths[chosen],
        spoken.counts[chosen],
        zero_infinity=safe,
    )


def utterances(draw: Draw, *, short: float, safe: bool, steps: int = 200) -> Plan:
    """Symbols out of frames."""
    known, proof = make_utterances(draw.stream("data"), short=short)
    model = Recognizer(draw.integer(24, 32))
    batches = Batches(draw.stream("order"), 400, 12)
    keys = draw.choice(("train/ctc_loss", "dev/ctc_loss"), ("loss", "dev_loss"))
    every = torch.arange(120)

    def held_out(model: nn.Module) -> dict[str, float]:
        return {keys[1]: float(transcribe(model, proof, every[:60], safe=True))}

    return Plan(
        model=model,
        optimizer=adam(draw, model.parameters(), 8e-3),
        loss=lambda model, step: transcribe(model, known, batches.take(step), safe=safe),
        judge=lambda model: float(transcribe(model, proof, every[60:], safe=True)),
        held_out=held_out,
        steps=steps,
        per_epoch=batches.per_epoch,
        clip=5.0,
        key=keys[0],
    )


def keywords(
    draw: Draw,
    model: nn.Module | None = None,
    *,
    rate: float = 3e-3,
    steps: int = 220,
    parts: Parts | None = None,
    change: Change | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hits: bool = True,
    shuffled: bool = True,
) -> Plan:
    """Which chirp a spectrogram holds."""
    model = model or KeywordNet(draw.integer(16, 24))
    return supervise(
        draw,
        parts or make_keywords(draw.stream("data")),
        model,
        optimizer or adam(draw, model.parameters(), rate),
        functional.cross_entropy,
        steps=steps,
        keys=naming(draw),
        change=change,
        hits=hits,
        shuffled=shuffled,
    )


def match(output: Tensor, y: Tensor) -> Tensor:
    """Mean square error of one number for each row."""
    return functional.mse_loss(output[:, 0], y)


def series(
    draw: Draw,
    model: nn.Module | None = None,
    *,
    rate: float = 5e-3,
    steps: int = 240,
    parts: Parts | None = None,
    criterion: Criterion = match,
    honest: Criterion = match,
    optimizer: torch.optim.Optimizer | None = None,
    keys: tuple[str, str] | None = None,
    call: Call = call_plainly,
) -> Plan:
    """The load of the next hour."""
    model = model or Forecaster(draw.choice("gru", "lstm"), draw.integer(16, 24))
    return supervise(
        draw,
        parts or make_series(draw.stream("data")),
        model,
        optimizer or adam(draw, model.parameters(), rate),
        criterion,
        steps=steps,
        keys=keys or draw.choice(("mse", "val_mse"), ("train_loss", "val_loss")),
        honest=honest,
        call=call,
    )


def clicks(draw: Draw, *, rate: float = 4e-3, steps: int = 280, base: float = -3.2) -> Plan:
    """Which rows were clicked."""
    model = Clicks(draw.integer(24, 40))
    return supervise(
        draw,
        make_clicks(draw.stream("data"), base=base),
        model,
        adam(draw, model.parameters(), rate),
        functional.binary_cross_entropy_with_logits,
        size=128,
        steps=steps,
        keys=draw.choice(("train/logloss", "val/logloss"), ("loss", "eval_loss")),
    )


def reversals(draw: Draw, *, cut: bool = False, steps: int = 260, length: int = 5) -> Plan:
    """Rows backwards, by an encoder and a decoder."""
    model = Reverser(draw.integer(28, 36), cut=cut)
    return supervise(
        draw,
        make_reversals(draw.stream("data"), length=length),
        model,
        adam(draw, model.parameters(), 6e-3),
        next_letter,
        steps=steps,
        keys=naming(draw),
        call=lambda model, x, y: model(x, y),
    )
