"""Models and training steps that the tests of parameters share, and a float64 reference."""

import torch
from torch import nn


def make_classifier(width=16):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, width),
        nn.Tanh(),
        nn.Linear(width, 3),
    )


class TiedModel(nn.Module):
    """An embedding whose weight is also the output's, and a block that is used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.again = self.block
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        return self.out(self.again(self.block(self.embedding(tokens)))) * self.scale


def run_backward(model, shape=(5, 1, 8, 8), scale=1.0):
    loss = model(torch.randn(*shape)).square().mean() * scale
    loss.backward()
    return loss


def by_name(records):
    found = {record.parameter_name: record for record in records}
    assert len(found) == len(records)
    return found


class CopiedParameters:
    """What the parameters of a model are now."""

    def __init__(self, model):
        self.before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def difference(self, model, name):
        now = dict(model.named_parameters())[name].detach()
        return now.double() - self.before[name].double()


def assert_statistics(record, prefix, tensor, *, rel=2e-6):
    """Hold the fields of a record against float64 arithmetic over a whole tensor."""
    values = tensor.detach().double().reshape(-1)
    expected = {
        "mean": values.mean().item(),
        "std": values.std(correction=0).item(),
        "min": values.min().item(),
        "max": values.max().item(),
        "norm": values.norm().item(),
    }
    size = values.abs().max().item()
    for name, wanted in expected.items():
        found = getattr(record, f"{prefix}_{name}")
        assert abs(found - wanted) <= rel * max(abs(wanted), size), (name, found, wanted)
