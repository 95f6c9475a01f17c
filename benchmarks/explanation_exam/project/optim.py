"""Stochastic gradient descent."""

import numpy as np

LONGEST = 5.0


def clip(gradients):
    size = np.sqrt(sum(float((each**2).sum()) for each in gradients))
    factor = min(1.0, LONGEST / (size + 1e-12))
    return [each * factor for each in gradients]


def decay(weights, strength, lr):
    return [each * (1.0 - lr * strength) for each in weights]


class Momentum:
    """Remembers where it went."""

    def __init__(self, lr, weight_decay):
        self.lr = lr
        self.weight_decay = weight_decay
        self.speeds = None

    def step(self, weights, gradients):
        """The weights after a step."""
        gradients = clip(gradients)
        if self.speeds is None:
            self.speeds = [np.zeros_like(each) for each in weights]
        share = 0.9
        self.speeds = [share * old + new for old, new in zip(self.speeds, gradients, strict=True)]
        kept = decay(weights, self.weight_decay, self.lr)
        return [each - self.lr * speed for each, speed in zip(kept, self.speeds, strict=True)]
