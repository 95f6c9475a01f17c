"""What instruments add to a step of a small mixture of experts with attention."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

import quark

WIDTH, EXPERTS, LENGTH, BATCH, LAYERS = 128, 8, 128, 8, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Any) -> Any:
        x = x + self.attention(x, x, x, average_attn_weights=False)[0]
        shares, chosen = self.router(x).softmax(-1).topk(self.top_k, -1)
        for index, expert in enumerate(self.experts):
            x = x + (shares * (chosen == index)).sum(-1, keepdim=True) * expert(x)
        return x


def measure_instruments(*, quick: bool) -> list[dict[str, Any]]:
    """Blocks of steps with and without, in turns: ratios of the thread's own time."""
    torch.set_num_threads(1)
    extras: dict[str, Any] = {
        "A/A": list,
        "RouterLoad": lambda: [quark.RouterLoad()],
        "AttentionEntropy": lambda: [quark.AttentionEntropy()],
        "both, of every 50th step": lambda: [quark.RouterLoad(), quark.AttentionEntropy()],
    }
    rows = []
    for name, make in extras.items():
        every = 50 if "50th" in name else 1
        rows.append({"what": name, "added": _measure(make, every, 3 if quick else 8)})
        print(f"  {name:28} {rows[-1]['added']:+.2%} of a step")
    return rows


def _measure(make: Any, every: int, blocks: int) -> float:
    model = nn.Sequential(*(_Block() for _ in range(LAYERS)))
    x = torch.randn(BATCH, LENGTH, WIDTH)
    taken: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        session = quark.start_run(project="instruments", storage_dir=folder)
        parts = {"layers": False, "parameters": False, "telemetry": False}
        watches = {
            False: quark.watch(session, model, every_n_steps=every, **parts),
            True: quark.watch(session, model, every_n_steps=every, extras=make(), **parts),
        }
        step = 0
        for _ in range(blocks):
            for has_extras, watch in watches.items():
                for _ in range(max(5, every)):
                    begin = time.thread_time()
                    watch.step(step)
                    model(x).sum().backward()
                    taken[has_extras].append(time.thread_time() - begin)
                    step += 1
        for watch in watches.values():
            watch.close()
        session.end_run()
    if every > 1:
        return statistics.fmean(taken[True]) / statistics.fmean(taken[False]) - 1
    return statistics.median(taken[True]) / statistics.median(taken[False]) - 1
