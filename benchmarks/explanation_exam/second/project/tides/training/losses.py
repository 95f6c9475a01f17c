"""How far off a guess is."""

import torch


class Bent:
    """Squares up to a distance, and straight beyond it."""

    def __init__(self, delta):
        self.delta = delta

    def __call__(self, guesses, targets):
        return self._bend(guesses - targets).mean()

    def _bend(self, errors):
        sizes = errors.abs()
        straight = self.delta * (sizes - 0.5 * self.delta)
        return torch.where(sizes < self.delta, self._square(errors), straight)

    def _square(self, errors):
        return 0.5 * errors**2


def explained(guesses, targets):
    """The share of the variance that is explained; 1 is all of it."""
    rest = ((guesses - targets) ** 2).sum()
    return 1.0 - float(rest / ((targets - targets.mean()) ** 2).sum())
