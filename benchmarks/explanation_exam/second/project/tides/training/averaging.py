"""The mean of the weights of late."""

import copy

import torch


class Averaged:
    def __init__(self, network, share=0.98):
        self.network = copy.deepcopy(network)
        self.share = share

    @torch.no_grad()
    def update(self, network):
        for old, new in zip(self.network.parameters(), network.parameters(), strict=True):
            old.copy_(self.blend(old, new))

    def blend(self, old, new):
        return mix(old, new, self.share)


def mix(first, second, share):
    return share * first + (1.0 - share) * second
