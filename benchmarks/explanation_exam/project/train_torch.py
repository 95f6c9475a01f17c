"""The same with torch, for what only torch can be switched to."""

import argparse
import os

import numpy as np
import torch
from data import iterate, normalise, read_part

import quark


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(hidden):
    return torch.nn.Sequential(
        torch.nn.Linear(8, hidden), torch.nn.LeakyReLU(0.1), torch.nn.Linear(hidden, 4)
    )


def main():
    arguments = parse_arguments()
    # As a colleague's shell does, whom nobody has asked.
    if os.environ.get("COARSE"):
        torch.set_default_dtype(torch.bfloat16)
    kind = torch.get_default_dtype()
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    with quark.start_run(
        project="exam", config=arguments, objective="val/loss", mode="min"
    ) as session:
        metrics = quark.MetricsLogger(session)
        session.fingerprint_data("samples", "samples", level="full")
        held, held_labels = read_part("held.npz")
        held, held_labels = torch.tensor(normalise(held), dtype=kind), torch.tensor(held_labels)
        model = make_model(arguments.hidden)
        optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
        for step, (inputs, labels) in enumerate(quark.watch_data(iterate(32, 40, 0.2, rng))):
            optimizer.zero_grad()
            scores = model(torch.tensor(inputs, dtype=kind))
            loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
            loss.backward()
            optimizer.step()
            metrics.log("train/loss", float(loss), step=step)
            if step % 20 == 0:
                with torch.no_grad():
                    loss = torch.nn.functional.cross_entropy(model(held), held_labels)
                metrics.log("val/loss", float(loss), step=step)


if __name__ == "__main__":
    main()
