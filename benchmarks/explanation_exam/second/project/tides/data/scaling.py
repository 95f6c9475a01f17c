"""Brings columns to one scale."""

import numpy as np


class Scaler:
    def fit(self, values):
        self.middle = values.mean(axis=0)
        self.spread = values.std(axis=0) + 1e-9
        return self

    def apply(self, values):
        return rescale(values, self.middle, self.spread)

    def undo(self, values):
        return np.asarray(values) * self.spread + self.middle


def rescale(values, middle, spread):
    return (values - middle) / spread
