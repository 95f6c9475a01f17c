"""Trainings that run and learn something else than they should; no rule was named for them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.diagnosis.families.fifth_course import Plan, make_wrong
from benchmarks.diagnosis.families.fifth_games import play_poles
from benchmarks.diagnosis.families.fifth_recipes import (
    keywords,
    match,
    next_letter,
    ratings,
    series,
    text,
)
from benchmarks.diagnosis.families.fifth_tasks import (
    CausalText,
    Forecaster,
    Parts,
    make_keywords,
    make_ratings,
    make_series,
)
from benchmarks.diagnosis.scenario import Draw


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
    make_wrong("labels_shifted_twice", make_shifted, "labels shifted twice"),
    make_wrong("batch_read_as_time", make_transposed, "batch_first is missing"),
    make_wrong("no_causal_mask", make_unmasked, "no causal mask"),
    make_wrong("unscaled_serving", make_unscaled_serving, "held-out data is not scaled"),
    make_wrong("ratings_joined_wrongly", make_joined, "ratings of other pairs"),
    make_wrong("error_of_all_pairs", make_broadcast, "mean over N x N"),
    make_wrong("falls_cost_nothing", make_poles, "bootstrapped across the end of an episode"),
)
