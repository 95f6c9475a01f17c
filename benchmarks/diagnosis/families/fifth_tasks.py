"""Tasks of the fifth family: ratings, documents, text, utterances, keywords, series, clicks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Parts:
    """Inputs and targets for training, for validation and for the oracle."""

    x: Tensor
    y: Tensor
    val_x: Tensor
    val_y: Tensor
    proof_x: Tensor
    proof_y: Tensor


def _part(x: Tensor, y: Tensor, shares: tuple[float, float] = (0.6, 0.2)) -> Parts:
    first = int(shares[0] * len(x))
    second = first + int(shares[1] * len(x))
    return Parts(x[:first], y[:first], x[first:second], y[first:second], x[second:], y[second:])


def make_ratings(
    rng: np.random.Generator,
    *,
    users: int = 120,
    items: int = 90,
    count: int = 5000,
    noise: float = 0.3,
    tail: float = 0.0,
) -> Parts:
    """Pairs of user and item, and ratings around 3; `tail` makes few items popular."""
    tastes, kinds = rng.normal(0, 0.6, (users, 3)), rng.normal(0, 0.6, (items, 3))
    generous, liked = rng.normal(0, 0.4, users), rng.normal(0, 0.6, items)
    weights = 1.0 / np.arange(1, items + 1) ** tail
    user = rng.integers(0, users, count)
    item = rng.choice(items, count, p=weights / weights.sum())
    mean = 3.0 + generous[user] + liked[item] + (tastes[user] * kinds[item]).sum(1)
    values = mean + noise * rng.normal(size=count)
    return _part(
        torch.from_numpy(np.stack([user, item], 1)), torch.tensor(values, dtype=torch.float32)
    )


class Factorizer(nn.Module):
    """Matrix factorisation with biases."""

    def __init__(self, users: int, items: int, rank: int, *, spread: float = 0.1):
        super().__init__()
        self.user = nn.Embedding(users, rank)
        self.item = nn.Embedding(items, rank)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, 0.0, spread)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        """A number for every pair."""
        user, item = pairs[:, 0], pairs[:, 1]
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.user(user) * self.item(item)).sum(1) + bias[:, 0]


def make_documents(
    rng: np.random.Generator, *, count: int = 1500, classes: int = 4, blur: float = 0.65
) -> Parts:
    """Rows of 24 word numbers, 0 is padding; `blur` is the share of words of no class."""
    words = 200
    topics = rng.dirichlet(np.full(words - 1, 0.05), classes)
    common = rng.dirichlet(np.full(words - 1, 0.5))
    label = rng.integers(0, classes, count)
    rows = np.zeros((count, 24), dtype=np.int64)
    for row, kind in zip(rows, label, strict=True):
        length = int(rng.integers(10, 25))
        chances = blur * common + (1 - blur) * topics[kind]
        row[:length] = 1 + rng.choice(words - 1, length, p=chances)
    return _part(torch.from_numpy(rows), torch.from_numpy(label))


class Documents(nn.Module):
    """Mean of word vectors, then a perceptron: embed, body.fc0, body.act0, ..., head."""

    def __init__(
        self,
        width: int,
        classes: int = 4,
        *,
        depth: int = 2,
        activation: type[nn.Module] = nn.ReLU,
        dropout: float = 0.0,
        norm: bool = False,
    ):
        super().__init__()
        self.embed = nn.Embedding(200, width, padding_idx=0)
        layers: dict[str, nn.Module] = {}
        for place in range(depth):
            layers[f"fc{place}"] = nn.Linear(width, width)
            if norm:
                layers[f"norm{place}"] = nn.LayerNorm(width)
            layers[f"act{place}"] = activation()
            if dropout:
                layers[f"drop{place}"] = nn.Dropout(dropout)
        self.body = nn.Sequential()
        for name, layer in layers.items():
            self.body.add_module(name, layer)
        self.head = nn.Linear(width, classes)

    def encode(self, words: Tensor) -> Tensor:
        """Mean over the words that are there."""
        there = (words > 0).float()[:, :, None]
        mean: Tensor = (self.embed(words) * there).sum(1) / there.sum(1).clamp(min=1)
        return mean

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        result: Tensor = self.head(self.body(self.encode(words)))
        return result


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.out(self.act(self.fc(self.norm2(x)))))


class CausalText(nn.Module):
    """A small GPT over letters; without the mask it reads what it is to say."""

    def __init__(
        self,
        letters: int,
        width: int,
        depth: int,
        *,
        causal: bool = True,
        tied: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(letters, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(_Block(width, 2, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, 0.0, 0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, letters: Tensor) -> Tensor:
        """Logits at every place."""
        x = self.embed(letters) + self.places(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x, self.causal)
        result: Tensor = self.head(self.norm(x))
        return result


@dataclass(frozen=True, slots=True)
class Utterances:
    """Frames, how many of them count, symbols and how many of those count."""

    frames: Tensor
    lengths: Tensor
    symbols: Tensor
    counts: Tensor


def make_utterances(
    rng: np.random.Generator, *, count: int = 400, short: float = 0.0
) -> tuple[Utterances, Utterances]:
    """Symbols spoken for 3 to 5 frames each, for training and for the oracle.

    Args:
        rng: Draws.
        count: Of utterances.
        short: Share of training utterances that were cut to fewer frames than symbols.
    """
    voices = rng.normal(0, 1.0, (7, 10))

    def speak(number: int, cut: float) -> Utterances:
        frames = 0.4 * rng.normal(size=(number, 36, 10))
        symbols = rng.integers(1, 7, (number, 6))
        counts = rng.integers(3, 7, number)
        lengths = np.empty(number, dtype=np.int64)
        for index in range(number):
            place = 1
            for symbol in symbols[index, : counts[index]]:
                lasts = int(rng.integers(3, 6))
                frames[index, place : place + lasts] += voices[symbol]
                place += lasts + 1
            lengths[index] = min(36, place + 1)
        lost = rng.uniform(size=number) < cut
        lengths[lost] = counts[lost] - 1
        return Utterances(
            torch.tensor(frames, dtype=torch.float32),
            torch.from_numpy(lengths),
            torch.from_numpy(symbols),
            torch.from_numpy(counts.astype(np.int64)),
        )

    return speak(count, short), speak(120, 0.0)


class Recognizer(nn.Module):
    """conv, act, rnn, head: log-probabilities of symbols, 0 is the blank."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(10, width, 3, padding=1)
        self.act = nn.ReLU()
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, frames: Tensor) -> Tensor:
        """Batch x frames x symbols."""
        states, _ = self.rnn(self.act(self.conv(frames.transpose(1, 2))).transpose(1, 2))
        return self.head(states).log_softmax(-1)


def make_keywords(
    rng: np.random.Generator, *, count: int = 1200, noise: float = 0.6, scale: float = 1.0
) -> Parts:
    """Spectrograms 12 x 20 of five chirps that begin anywhere."""
    slopes = (-0.6, -0.3, 0.0, 0.3, 0.6)
    label = rng.integers(0, 5, count)
    sounds = noise * rng.normal(size=(count, 12, 20))
    bands = np.arange(12)[:, None]
    for index, kind in enumerate(label):
        begin = int(rng.integers(0, 8))
        times = np.arange(12)
        centre = rng.uniform(4.5, 6.5) + slopes[kind] * (times - 6)
        shape = np.exp(-0.5 * (bands - centre[None, :]) ** 2)
        sounds[index, :, begin : begin + 12] += 2.0 * shape
    return _part(torch.tensor(scale * sounds, dtype=torch.float32), torch.from_numpy(label))


class KeywordNet(nn.Module):
    """Convolutions over time with batch normalisation, then a perceptron."""

    def __init__(
        self,
        width: int,
        *,
        activation: type[nn.Module] = nn.ReLU,
        norm: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.conv0 = nn.Conv1d(12, width, 5, padding=2)
        self.norm0: nn.Module = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.act0 = activation()
        self.conv1 = nn.Conv1d(width, width, 5, padding=2)
        self.norm1: nn.Module = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.act1 = activation()
        self.fc = nn.Linear(width, width)
        self.act2 = activation()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 5)

    def forward(self, sounds: Tensor) -> Tensor:
        """Logits."""
        x = self.act0(self.norm0(self.conv0(sounds)))
        x = self.act1(self.norm1(self.conv1(x))).amax(2)
        return self.head(self.drop(self.act2(self.fc(x))))


def make_series(
    rng: np.random.Generator,
    *,
    count: int = 1400,
    noise: float = 0.25,
    window: int = 24,
    ahead: int = 1,
) -> Parts:
    """Windows of an hourly load and an hour ahead of each, cut by time, mean 0, deviation 1."""
    hours = np.arange(count + window + ahead)
    season = np.sin(2 * np.pi * hours / 24 + rng.uniform(0, 6))
    week = 0.6 * np.sin(2 * np.pi * hours / 168 + rng.uniform(0, 6))
    drift = np.zeros(len(hours))
    for hour in hours[1:]:
        drift[hour] = 0.8 * drift[hour - 1] + noise * rng.normal()
    load = season + week + 0.4 * season * week + drift
    load = (load - load.mean()) / load.std()
    windows = np.stack([load[start : start + window] for start in range(count)])
    targets = load[window + ahead - 1 :][:count]
    return _part(
        torch.tensor(windows[:, :, None], dtype=torch.float32),
        torch.tensor(targets, dtype=torch.float32),
    )


class Forecaster(nn.Module):
    """A recurrent network and a head on its last state."""

    def __init__(self, kind: str, width: int, *, inputs: int = 1, outputs: int = 1):
        super().__init__()
        made = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN, "relu": nn.RNN}[kind]
        options = {"nonlinearity": "relu"} if kind == "relu" else {}
        self.rnn = made(inputs, width, batch_first=True, **options)
        self.head = nn.Linear(width, outputs)

    def forward(self, windows: Tensor) -> Tensor:
        """Of the last state."""
        states, _ = self.rnn(windows)
        result: Tensor = self.head(states[:, -1])
        return result


def make_clicks(rng: np.random.Generator, *, count: int = 6000, base: float = -3.2) -> Parts:
    """Three categories of 30 levels and four numbers; few were clicked."""
    levels = rng.integers(0, 30, (count, 3))
    numbers = rng.normal(size=(count, 4))
    effects = rng.normal(0, 0.9, (3, 30))
    score = base + sum(effects[place][levels[:, place]] for place in range(3))
    score = score + numbers @ np.array([0.8, -0.6, 0.4, 0.0])
    clicked = rng.uniform(size=count) < 1 / (1 + np.exp(-score))
    joined = np.concatenate([levels, numbers], 1)
    return _part(
        torch.tensor(joined, dtype=torch.float32), torch.tensor(clicked, dtype=torch.float32)
    )


class Clicks(nn.Module):
    """Embeddings of categories and numbers, joined, through a perceptron."""

    def __init__(self, width: int, *, spread: float = 0.1):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(30, 8) for _ in range(3))
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, 0.0, spread)
        self.fc0 = nn.Linear(28, width)
        self.act0 = nn.ReLU()
        self.fc1 = nn.Linear(width, width)
        self.act1 = nn.ReLU()
        self.head = nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """A logit for every row."""
        known = [table(rows[:, place].long()) for place, table in enumerate(self.tables)]
        x = torch.cat([*known, rows[:, 3:]], 1)
        return self.head(self.act1(self.fc1(self.act0(self.fc0(x)))))[:, 0]


def make_reversals(rng: np.random.Generator, *, count: int = 1500, length: int = 5) -> Parts:
    """Rows of digits 1 to 8 and the same rows backwards."""
    rows = torch.from_numpy(rng.integers(1, 9, (count, length)))
    return _part(rows, rows.flip(1))


class Reverser(nn.Module):
    """Encoder, decoder with attention, teacher forcing; `cut` detaches the encoder."""

    def __init__(self, width: int, *, cut: bool = False):
        super().__init__()
        self.cut = cut
        self.embed = nn.Embedding(9, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.bridge = nn.Linear(width, width)
        self.target = nn.Embedding(9, width)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(2 * width, 9)

    def forward(self, rows: Tensor, said: Tensor) -> Tensor:
        """Logits of every digit, given those that were to be said before it."""
        keys, last = self.encoder(self.embed(rows))
        if self.cut:
            keys, last = keys.detach(), last.detach()
        begun = torch.cat([torch.zeros_like(said[:, :1]), said[:, :-1]], 1)
        states, _ = self.decoder(self.target(begun), torch.tanh(self.bridge(last)))
        weights = (states @ keys.transpose(1, 2)).softmax(-1)
        result: Tensor = self.head(torch.cat([states, weights @ keys], -1))
        return result
