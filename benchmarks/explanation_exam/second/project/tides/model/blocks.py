"""What networks are made of."""

from torch import nn


class Residual(nn.Module):
    """A layer that adds to what it is given."""

    def __init__(self, width, strength=0.7, drop=0.0):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.strength = strength
        self.drop = nn.Dropout(drop)

    def forward(self, values):
        return values + self.strength * self.drop(nn.functional.silu(self.inner(values)))


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.outer = nn.Linear(width, 1)

    def forward(self, values):
        return self.outer(values).squeeze(1)
