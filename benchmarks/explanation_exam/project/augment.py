"""Noise on the samples."""


def jitter(inputs, noise, rng):
    if noise == 0:
        return inputs
    return inputs + noise * rng.normal(size=inputs.shape)
