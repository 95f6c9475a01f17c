"""Watch a transformer of 10 million parameters learn to write Python.

    python examples/train_transformer.py [--steps 30] [--storage-dir DIR]

The text is that of Python's own standard library, so nothing is downloaded.
One line in the loop watches layers, parameters and hardware. Needs the extra
"torch".
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn

import quark

CONTEXT = 128


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.bytes(tokens) + self.places(torch.arange(length))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def read_text(size_bytes: int = 2_000_000) -> torch.Tensor:
    """Source of the standard library, as bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch a transformer learn to write Python.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    text = read_text()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.1f} million parameters, {len(text) / 1e6:.1f} MB of text")
    with quark.start_run(
        project="transformer",
        config={"parameters": count, "context": CONTEXT, "batch_size": arguments.batch_size},
        storage_dir=arguments.storage_dir,
    ) as session:
        metrics = quark.MetricsLogger(session)
        with quark.watch(session, model, optimizer, every_n_steps=arguments.every) as watch:
            for step in range(arguments.steps):
                watch.step(step)
                begin = time.perf_counter()
                starts = torch.randint(len(text) - CONTEXT - 1, (arguments.batch_size,))
                batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
                watch.mark_data_ready()
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                metrics.log_many(
                    {"train/loss": loss.item(), "train/step_s": time.perf_counter() - begin},
                    step=step,
                )
        print(f"loss {loss.item():.3f}")
    print(f"see it again with: quark show {session.run_id}")


if __name__ == "__main__":
    main()
