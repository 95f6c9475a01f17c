"""Trainings that run to the end, and wrongly; each names who was caught by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from benchmarks.diagnosis import datasets
from benchmarks.diagnosis.families.fourth_course import (
    Course,
    both,
    broken,
    given_away,
)
from benchmarks.diagnosis.families.fourth_tasks import supervise
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def divided_as_integers(recorder: Recorder, draw: Draw) -> Truth:
    """StackOverflow: uint8 images // 255 (or ToTensor on what is 0 to 1 already): all black."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"))
        scale = 16 * 15.9
        if faulty:
            parts = {
                name: torch.div((getattr(data, name) * scale).byte(), 255, rounding_mode="floor")
                for name in ("x", "val_x")
            }
            data = replace(data, **{name: part.float() for name, part in parts.items()})
        channels = made.integer(6, 10)
        model = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * channels, 10),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        return supervise(made, model, data, optimizer, steps=220)

    _, notes, twin = both(make, recorder, draw)
    end = float(np.median(notes.losses[-50:]))
    return broken(
        end > 2.2 and given_away(notes, twin) > 0.7,
        f"every pixel of every image is 0; loss ends at {end:.3g}, chance 2.303; proof "
        f"{notes.end:.3g} against {twin.end:.3g}",
        expected=("constant_inputs",),
        tolerated=(
            "activation_collapse", "plateau", "vanishing_gradients", "stagnant_layers",
            "mislabelled_data",
        ),
        onset_step=0,
    )  # fmt: skip


SCENARIOS = (
    Scenario(
        name="fourth/constant_inputs/divided_as_integers", kind="fault", train=divided_as_integers
    ),
)
