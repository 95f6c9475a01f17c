"""Small networks whose layers have names worth blaming."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
}


def make_mlp(
    sizes: Sequence[int],
    *,
    activation: str = "relu",
    norm: bool = False,
    dropout: float = 0.0,
    scaled: bool = True,
) -> nn.Sequential:
    """fc0, act0, fc1, ..., head; `scaled` starts it as suits the activation."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["flatten"] = nn.Flatten()
    for place, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
        layers[f"fc{place}"] = linear = nn.Linear(inputs, outputs)
        if scaled:
            _start(linear, activation)
        if norm:
            layers[f"norm{place}"] = nn.BatchNorm1d(outputs)
        layers[f"act{place}"] = ACTIVATIONS[activation]()
        if dropout:
            layers[f"drop{place}"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(sizes[-2], sizes[-1])
    return nn.Sequential(layers)


def make_convolutional(
    channels: Sequence[int],
    side: int,
    classes: int,
    *,
    activation: str = "relu",
    norm: bool = False,
    hidden: int = 32,
) -> nn.Sequential:
    """conv0, act0, conv1, ..., fc, head; every second convolution halves the side."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = 1
    for place, after in enumerate(channels):
        layers[f"conv{place}"] = conv = nn.Conv2d(before, after, 3, padding=1)
        _start(conv, activation)
        if norm:
            layers[f"norm{place}"] = nn.BatchNorm2d(after)
        layers[f"act{place}"] = ACTIVATIONS[activation]()
        if place % 2 and side > 2:
            layers[f"pool{place}"] = nn.MaxPool2d(2)
            side //= 2
        before = after
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(before * side * side, hidden)
    _start(layers["fc"], activation)
    layers["act"] = ACTIVATIONS[activation]()
    layers["head"] = nn.Linear(hidden, classes)
    return nn.Sequential(layers)


class Recurrent(nn.Module):
    """Embedding or projection, a recurrent layer, a head on the last or on every state."""

    def __init__(
        self,
        kind: str,
        inputs: int,
        width: int,
        outputs: int,
        *,
        letters: bool,
        every_state: bool = False,
    ):
        super().__init__()
        self.embed = nn.Embedding(inputs, width) if letters else nn.Linear(inputs, width)
        made = {"rnn": nn.RNN, "irnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind]
        options = {"nonlinearity": "relu"} if kind == "irnn" else {}
        self.rnn = made(width, width, batch_first=True, **options)
        self.head = nn.Linear(width, outputs)
        self.every_state = every_state

    def forward(self, x: Tensor) -> Tensor:
        """Of the last state, or of every one."""
        states, _ = self.rnn(self.embed(x))
        return self.head(states if self.every_state else states[:, -1])


class Transformer(nn.Module):
    """Letters in, letters out: one or two layers with causal attention."""

    def __init__(self, letters: int, width: int, depth: int, length: int, *, heads: int = 2):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next letter at every place."""
        x = self.embed(x) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(self.norm(x))


class Autoencoder(nn.Module):
    """Through a narrow code and back."""

    def __init__(self, inputs: int, width: int, code: int, *, activation: str = "relu"):
        super().__init__()
        self.encoder = make_mlp([inputs, width, code], activation=activation)
        self.decoder = make_mlp([code, width, inputs], activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """The input again."""
        return self.decoder(self.encoder(x))


class Classifier(nn.Module):
    """A backbone and a head of their own, as in fine-tuning; `cut` detaches the backbone."""

    def __init__(self, backbone: nn.Module, width: int, classes: int, *, cut: bool = False):
        super().__init__()
        self.backbone = backbone
        self.neck = nn.Linear(width, width)
        self.act = nn.ReLU()
        self.head = nn.Linear(width, classes)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        features = self.backbone(x)
        if self.cut:
            features = features.detach()
        return self.head(self.act(self.neck(features)))


def _start(layer: nn.Module, activation: str) -> None:
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    if activation in {"tanh", "sigmoid"}:
        nn.init.xavier_normal_(layer.weight)
    else:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
