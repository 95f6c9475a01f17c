"""Trains a small classifier, and says how it goes."""

import argparse

import numpy as np
import roundings
from data import iterate, normalise, read_part
from model import find_gradients, forward, make_weights, measure_loss
from optim import Momentum
from schedule import find_rate

import quark


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--title", default="plain")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@quark.trace("train_step")
def train_step(weights, optimizer, inputs, labels):
    loss, gradients = find_gradients(weights, inputs, labels)
    return loss, optimizer.step(weights, [roundings.settle(each) for each in gradients])


def evaluate(weights, inputs, labels):
    scores = forward(weights, normalise(inputs))[2]
    return measure_loss(scores, labels)[0], float((scores.argmax(axis=1) == labels).mean())


def main():
    arguments = parse_arguments()
    rng = np.random.default_rng(arguments.seed)
    with quark.start_run(
        project="exam", config=arguments, objective="val/loss", mode="min"
    ) as session:
        metrics = quark.MetricsLogger(session)
        session.fingerprint_data("samples", "samples", level="full")
        inputs, labels = read_part("train-0.npz")
        held_inputs, held_labels = read_part("held.npz")
        weights = make_weights(inputs.shape[1], arguments.hidden, 4, rng)
        optimizer = Momentum(arguments.lr, arguments.weight_decay)
        batches = iterate(arguments.batch_size, arguments.epochs, arguments.noise, rng)
        steps = arguments.epochs * (3 * len(labels) // arguments.batch_size)
        for step, (inputs, labels) in enumerate(quark.watch_data(batches, name="train")):
            optimizer.lr = find_rate(arguments.lr, step, steps)
            loss, weights = train_step(weights, optimizer, inputs, labels)
            if step % arguments.log_every == 0:
                metrics.log("train/loss", loss, step=step)
            if step % 20 == 0:
                metrics.log("val/loss", evaluate(weights, held_inputs, held_labels)[0], step=step)
        loss, accuracy = evaluate(weights, held_inputs, held_labels)
        metrics.log_many({"val/loss": loss, "val/acc": accuracy}, step=step)
        session.fingerprint("scores", forward(weights, normalise(held_inputs))[2], step=step)


if __name__ == "__main__":
    main()
