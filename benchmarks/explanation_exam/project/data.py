"""Reads the samples."""

from pathlib import Path

import numpy as np
from augment import jitter

FOLDER = Path(__file__).parent / "samples"


def read_part(name):
    with np.load(FOLDER / name) as file:
        return file["inputs"], file["labels"]


def read_training():
    parts = [read_part(f"train-{number}.npz") for number in range(3)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def normalise(inputs):
    return inputs / 4.0


def iterate(batch_size, epochs, noise, rng):
    inputs, labels = read_training()
    for _ in range(epochs):
        for start in range(0, len(labels), batch_size):
            chosen = slice(start, start + batch_size)
            yield normalise(jitter(inputs[chosen], noise, rng)), labels[chosen]
