"""A tiny mixture of experts and a tiny transformer, which really train."""

import torch
from torch import nn


class TinyExperts(nn.Module):
    """Two experts for each token out of several, by a linear router."""

    def __init__(self, width=8, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class TinyMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = TinyExperts()
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.block(x))


class TinyTransformer(nn.Module):
    def __init__(self, *, need_weights=True, averages=False):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 16)
        self.options = {"need_weights": need_weights, "average_attn_weights": averages}
        self.seen = None

    def forward(self, tokens):
        x = self.embed(tokens)
        attended, self.seen = self.attention(x, x, x, **self.options)
        return self.head(x + attended)


def train(watch, model, steps, *, after=None):
    """Some steps of next-token prediction."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        watch.step(step)
        tokens = torch.randint(0, 16, (2, 6))
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(step, tokens)
