"""Which word ordinary programs get, that nobody wrote for an exam: broken ones, and sound ones."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import quark

CLASSES, FEATURES = 10, 20


def draw(count, seed, noise=1.0):
    """Points about a centre of each class."""
    centres = 1.2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    points = centres[labels] + noise * torch.randn(count, FEATURES, generator=generator)
    return points, labels


def shuffle(labels):
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


class Constant(nn.Module):
    """A model that gives the same for every input."""

    def __init__(self):
        super().__init__()
        self.body, self.bias = make_model(), nn.Parameter(torch.zeros(CLASSES))

    def forward(self, points):
        return 0.0 * self.body(points) + self.bias


POINTS, LABELS = draw(600, 1)
HELD_POINTS, HELD_LABELS = draw(300, 2)


def adam(rate=1e-2):
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)


def train(
    root, *, watched=True, epochs=12, optimizer=None, points=POINTS, labels=LABELS,
    held_out=(HELD_POINTS, HELD_LABELS), model=make_model, measure=None, validates=True,
    scores=True, clears=True, change=lambda epoch, loss, accuracy: (loss, accuracy),
    spoil=lambda step, batch: batch, config=None, **arguments,
):  # fmt: skip
    """Train and log as people do; returns the run."""
    net, measure = model(), measure or nn.CrossEntropyLoss()
    optimizer = (optimizer or adam())(net)
    session = quark.start_run(project="p", storage_dir=root, config=config or {}, **arguments)
    with session:
        metrics = quark.MetricsLogger(session)
        watch = quark.watch(session, net, optimizer) if watched else None
        step = 0
        for epoch in range(epochs):
            order = torch.randperm(len(points), generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(50):
                loss = measure(net(spoil(step, points[rows])), labels[rows])
                if clears:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                metrics.log("train/loss", loss.item(), step=step)
                if watch is not None:
                    watch.step(step)
                step += 1
            if validates:
                with torch.no_grad():
                    output = net(held_out[0])
                hits = (output.argmax(1) == held_out[1]).float().mean().item()
                loss, hits = change(epoch, measure(output, held_out[1]).item(), hits)
                metrics.log("val/loss", loss, step=step)
                if scores:
                    metrics.log("val/acc", hits, step=step)
    return session


def judge(session):
    scores = quark.AnalyzerEngine(session).analyze(store=False).health_scores
    return {score.score_key: score for score in scores}


def lose_validation(epoch, loss, accuracy):
    return (loss if epoch < 6 else math.nan), accuracy


FAR = {"points": 300.0 * POINTS, "held_out": (300.0 * HELD_POINTS, HELD_LABELS), "epochs": 4,
       "optimizer": adam(1e-4)}  # fmt: skip
BROKEN = {
    "shuffled labels": {"labels": shuffle(LABELS)},
    "shuffled labels, never validated": {
        "labels": shuffle(LABELS), "watched": False, "validates": False,
    },
    "validated with the labels of others": {"held_out": (HELD_POINTS, shuffle(HELD_LABELS))},
    "validated by its accuracy alone, at chance": {
        "held_out": (HELD_POINTS, shuffle(HELD_LABELS)),
        "change": lambda epoch, loss, accuracy: (1.0 / (epoch + 1.0), accuracy),
    },
    "validated on the training data": {
        "labels": shuffle(LABELS), "held_out": (POINTS, LABELS), "watched": False,
    },
    "validation prepared otherwise": {"held_out": (0.05 * HELD_POINTS + 3.0, HELD_LABELS)},
    "validation ends as NaN": {"change": lose_validation},
    "validation ends as NaN, with an objective": {
        "change": lose_validation, "objective": "val/acc",
    },
    "optimizer of another model": {
        "optimizer": lambda _: adam()(make_model()), "watched": False,
    },
    "optimizer of the last layer": {
        "optimizer": lambda model: adam()(model[-1]), "watched": False,
    },
    "steps too small": {"optimizer": adam(1e-6), "watched": False},
    "steps too large": {"optimizer": adam(0.3), "watched": False},
    "gradients never cleared": {
        "clears": False, "watched": False,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    },
    "softmax before the loss": {
        "model": lambda: nn.Sequential(make_model(), nn.Softmax(1)), "watched": False,
    },
    "constant outputs": {"model": Constant},
    "many times the loss of guesses": FAR,
    "many times the loss of guesses, with an objective": {**FAR, "objective": "val/acc"},
    "many times the loss of known guesses": {
        **FAR, "scores": False, "config": {"num_classes": CLASSES},
    },
    "explodes under an objective that rises": {
        "objective": "val/acc", "spoil": lambda step, batch: batch * (1.0 if step < 90 else 1e4),
    },
}  # fmt: skip
SOUND = {
    "watched and validated": {},
    "three epochs": {"epochs": 3},
    "named by its accuracy": {"objective": "val/acc"},
    "named by its loss": {"objective": "val/loss"},
    "no score": {"scores": False},
    "plain steps": {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    },
    "a summed loss": {
        "measure": nn.CrossEntropyLoss(reduction="sum"), "optimizer": adam(3e-3),
    },
    "a regression": {
        "model": lambda: nn.Sequential(
            nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        ),
        "labels": 100.0 * POINTS[:, :1] + 300.0, "measure": nn.MSELoss(), "scores": False,
        "held_out": (HELD_POINTS, 100.0 * HELD_POINTS[:, :1] + 300.0), "epochs": 40,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_program_is_never_called_healthy(tmp_path, name):
    scores = judge(train(tmp_path, **BROKEN[name]))
    assert scores["overall"].word != "healthy"
    if "valid" in name or "guesses" in name:
        assert not scores["generalization"].known or scores["generalization"].score < 85.0


@pytest.mark.long
@pytest.mark.parametrize("name", list(SOUND))
def test_a_sound_program_that_is_watched_and_validated_is_healthy(tmp_path, name):
    overall = judge(train(tmp_path, **SOUND[name]))["overall"]
    assert (overall.word, overall.known) == ("healthy", True), overall.summary


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({"watched": False}, "quark.watch(session, model, optimizer)"),
        ({"validates": False}, 'metrics.log("val/loss", value, step=step)'),
    ],
    ids=["not watched", "not validated"],
)
def test_what_too_little_is_known_of_has_no_problem_found(tmp_path, arguments, call):
    scores = judge(train(tmp_path, epochs=4, **arguments))
    overall = scores["overall"]
    assert (overall.word, overall.status) == ("no problem found", "watch")
    ran = f"{overall.metadata['rules_with_data']} of {overall.metadata['rules']} checks ran"
    assert f"{ran}; {call} lets more run" in overall.summary
    assert "healthy" not in [score.word for score in scores.values()]


def test_rewards_of_a_game_need_no_validation(tmp_path):
    noise = np.random.default_rng(0)
    for name, arguments in (("episode_return", {}), ("progress", {"mode": "max"})):
        if arguments:
            arguments["objective"] = name
        with quark.start_run(project="p", storage_dir=tmp_path, **arguments) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(200):
                metrics.log("policy_loss", 0.05 * noise.standard_normal(), step=step)
                value = 200.0 * (1.0 - math.exp(-step / 60.0)) + 10.0 * noise.standard_normal()
                metrics.log(name, value, step=step)
        overall = judge(session)["overall"]
        assert overall.metadata["learning"]["state"] == "learned"
        assert "val/loss" not in overall.summary
