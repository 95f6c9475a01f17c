"""Trainings that run to the end, and wrongly; each names who was caught by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diagnosis import datasets, sequences
from benchmarks.diagnosis.families.fourth_course import (
    Course,
    both,
    broken,
    calm,
    given_away,
)
from benchmarks.diagnosis.families.fourth_tasks import cross_entropy, hit_rate, supervise
from benchmarks.diagnosis.networks import Recurrent
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth


def zero_grad_forgotten(recorder: Recorder, draw: Draw) -> Truth:
    """Karpathy, "most common neural net mistakes": you forgot to .zero_grad() before backward."""
    left: list[float] = []

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_shapes(made.stream("data"), count=700)
        channels = made.integer(6, 10)
        model = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * channels, 4),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

        def update(_step: int, loss: Tensor) -> None:
            if faulty:
                kept = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
                left.append(sum(kept))
            else:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return supervise(made, model, data, optimizer, steps=220, update=update)

    _, notes, twin = both(make, recorder, draw)
    return broken(
        min(left[1:]) > 0 and given_away(notes, twin) > 0.1,
        f"gradients were there before each backward (norms at least {min(left[1:]):.3g}); proof "
        f"{notes.end:.3g} against {twin.end:.3g}",
        expected=("gradients_not_cleared",),
        tolerated=(
            "exploding_gradients", "loss_spike", "divergence", "plateau", "update_ratio",
            "activation_collapse", "overfitting_onset",
        ),
        onset_step=1,
    )  # fmt: skip


def counter_never_full(recorder: Recorder, draw: Draw) -> Truth:
    """Gradient accumulation by the batch's number, when an epoch has fewer batches than that."""
    onset = draw.onset_step(240, 0.25, 0.45)
    stepped: list[int] = []

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.2)
        width = made.integer(24, 48)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        accumulate = 4
        # From the onset on a filter leaves three batches an epoch; the counter starts anew in each.
        counter = {"batch": 0}

        def update(step: int, loss: Tensor) -> None:
            if faulty and step >= onset and counter["batch"] >= 3:
                counter["batch"] = 0
            (loss / accumulate).backward()
            counter["batch"] += 1
            if counter["batch"] % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if faulty:
                    stepped.append(step)

        course = supervise(made, model, data, optimizer, steps=240, size=24)
        return replace(course, update=update)

    _, notes, twin = both(make, recorder, draw)
    last = max(stepped)
    return broken(
        last <= onset + 4 and given_away(notes, twin) > 0.15,
        f"the last step of the optimizer was at {last} of 240; proof {notes.end:.3g} against "
        f"{twin.end:.3g}",
        expected=("optimizer_not_stepping",),
        tolerated=("gradients_not_cleared", "stagnant_layers", "plateau", "exploding_gradients"),
        onset_step=last + 1,
    )


def validated_while_training(recorder: Recorder, draw: Draw) -> Truth:
    """wolny/pytorch-3dunet issue 53 and the Udacity course's issue 3: model.eval() is missing."""
    apart: list[float] = []

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.2)
        width = made.integer(48, 80)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 10),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        course = supervise(made, model, data, optimizer, steps=240)

        def validate() -> dict[str, float]:
            with torch.no_grad():
                output = model(data.val_x)
            apart.append(float(cross_entropy(output, data.val_y)))
            return {"val/loss": apart[-1], "val/accuracy": hit_rate(output, data.val_y)}

        return replace(course, held_out=validate) if faulty else course

    _, notes, twin = both(make, recorder, draw)
    return broken(
        float(np.median(apart[-4:])) > 1.3 * notes.end,
        f"validation says {np.median(apart[-4:]):.3g}, the network in evaluation mode "
        f"{notes.end:.3g} (twin {twin.end:.3g})",
        expected=("training_mode_in_evaluation",),
        onset_step=0,
    )


def head_replaced_after_the_optimizer(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch forum: model.fc = nn.Linear(...) comes after Adam(model.parameters())."""

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
            )
            self.fc = nn.Sequential(nn.Linear(4 * width, 48), nn.ReLU(), nn.Linear(48, 100))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.features(x))

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.1)
        model = Net(made.integer(8, 14))
        if not faulty:
            model.fc = nn.Sequential(nn.Linear(4 * len(model.features[0].bias), 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        if faulty:
            model.fc = nn.Sequential(nn.Linear(4 * len(model.features[0].bias), 10))
        return supervise(made, model, data, optimizer, steps=220)

    _, notes, twin = both(make, recorder, draw)
    far = notes.moved("fc.0.weight")
    return broken(
        far == 0.0 and given_away(notes, twin) > 0.1,
        f"the head moved by {far}, the convolution by {notes.moved('features.0.weight'):.2g}; "
        f"proof {notes.end:.3g} against {twin.end:.3g}",
        expected=("parameters_not_optimized",),
        tolerated=("stagnant_layers", "mostly_frozen", "plateau", "gradients_not_cleared"),
        culprits=("fc.0", "fc", "fc.0.weight", "fc.0.bias"),
        onset_step=0,
    )


def frozen_by_a_loop_too_wide(recorder: Recorder, draw: Draw) -> Truth:
    """Transfer learning threads: requires_grad = False for all of model.parameters()."""

    def make(made: Draw, faulty: bool) -> Course:
        data = sequences.load_brackets(made.stream("data"), length=8, count=2000)
        model = Recurrent("gru", 4, made.integer(28, 40), 2, letters=True)
        if faulty:
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            model.head.bias.requires_grad_(True)
        given = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(given, lr=0.01)
        return supervise(made, model, data, optimizer, steps=240, size=64)

    course, notes, twin = both(make, recorder, draw)
    free = sum(p.numel() for p in course.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in course.model.parameters())
    gained = notes.proof[0] - notes.end
    return broken(
        gained < 0.05 * (twin.proof[0] - twin.end),
        f"{free} of {whole} parameters are trained; proof {notes.proof[0]:.3g} -> {notes.end:.3g} "
        f"against {twin.end:.3g}",
        expected=("mostly_frozen",),
        tolerated=("stagnant_layers", "plateau", "mislabelled_data", "parameters_not_optimized"),
        onset_step=0,
    )


def files_sorted_apart(recorder: Recorder, draw: Draw) -> Truth:
    """Karpathy's recipe, "verify that labels are right": two os.listdir() in different orders."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.1).flatten()
        if faulty:
            rng = made.stream("listing")
            parts = {
                name: getattr(data, name)[
                    torch.from_numpy(rng.permutation(len(getattr(data, name))))
                ]
                for name in ("y", "val_y")
            }
            data = replace(data, **parts)
        width = made.integer(16, 24)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return supervise(made, model, data, optimizer, steps=300, val_every=15)

    _, notes, twin = both(make, recorder, draw)
    chance, end = float(np.log(10)), float(np.median(notes.losses[-50:]))
    return broken(
        end > 0.9 * chance and given_away(notes, twin) > 0.9,
        f"training loss ends at {end:.3g}, chance is {chance:.3g}; proof {notes.end:.3g} against "
        f"{twin.end:.3g}",
        expected=("mislabelled_data",),
        tolerated=("plateau", "overfitting_onset"),
        onset_step=0,
    )


def divided_as_integers(recorder: Recorder, draw: Draw) -> Truth:
    """StackOverflow: uint8 images // 255 (or ToTensor on what is 0 to 1 already): all black."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"))
        scale = 16 * 15.9
        if faulty:
            parts = {
                name: torch.div((getattr(data, name) * scale).byte(), 255, rounding_mode="floor")
                for name in ("x", "val_x")
            }
            data = replace(data, **{name: part.float() for name, part in parts.items()})
        channels = made.integer(6, 10)
        model = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * channels, 10),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        return supervise(made, model, data, optimizer, steps=220)

    _, notes, twin = both(make, recorder, draw)
    end = float(np.median(notes.losses[-50:]))
    return broken(
        end > 2.2 and given_away(notes, twin) > 0.7,
        f"every pixel of every image is 0; loss ends at {end:.3g}, chance 2.303; proof "
        f"{notes.end:.3g} against {twin.end:.3g}",
        expected=("constant_inputs",),
        tolerated=(
            "activation_collapse", "plateau", "vanishing_gradients", "stagnant_layers",
            "mislabelled_data",
        ),
        onset_step=0,
    )  # fmt: skip


def target_broadcast(recorder: Recorder, draw: Draw) -> Truth:
    """PyTorch issues 16045 and 19699: (n, 1) against (n,) becomes n x n: the mean is learnt."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_friedman(made.stream("data"))
        for part in (data.y, data.val_y, data.proof_y):
            part.sub_(14.4).div_(5.0)
        width = made.integer(32, 64)
        model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.006)

        def measure(output: Tensor, target: Tensor) -> Tensor:
            if faulty:
                return (output - target.squeeze(1)).square().mean()
            return functional.mse_loss(output, target)

        return supervise(
            made,
            model,
            data,
            optimizer,
            measure=measure,
            proof=functional.mse_loss,
            steps=260,
            keys=("train_mse", "val_mse"),
        )

    _, notes, twin = both(make, recorder, draw)
    return broken(
        notes.end > 0.8 and given_away(notes, twin) > 0.8,
        f"error {notes.proof[0]:.3g} -> {notes.end:.3g} against {twin.end:.3g}; the variance is 1",
        tolerated=("plateau", "activation_collapse", "mislabelled_data", "vanishing_gradients"),
        onset_step=0,
    )


def reward_pushed_down(recorder: Recorder, draw: Draw) -> Truth:
    """Policy gradient threads: the sign is wrong; the loss falls, and so does the reward."""

    def make(made: Draw, faulty: bool) -> Course:
        rng = made.stream("data")
        contexts, arms = 8, made.integer(5, 8)
        worth = torch.from_numpy(rng.normal(size=(contexts, arms))).float()
        model = nn.Sequential(nn.Linear(contexts, 32), nn.Tanh(), nn.Linear(32, arms))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.006)
        seen = {"reward": 0.0}
        sign = 1.0 if faulty else -1.0

        def take(_step: int) -> Tensor:
            context = torch.randint(contexts, (64,))
            policy = torch.distributions.Categorical(
                logits=model(functional.one_hot(context, contexts).float())
            )
            arm = policy.sample()
            reward = worth[context, arm] + 0.3 * torch.randn(64)
            seen["reward"] = float(reward.mean())
            return sign * (policy.log_prob(arm) * (reward - reward.mean())).mean()

        def regret(model: nn.Module) -> float:
            chosen = functional.softmax(model(torch.eye(contexts)), dim=1)
            return float((worth.max(1).values - (chosen * worth).sum(1)).mean())

        return Course(
            model=model,
            optimizer=optimizer,
            loss=take,
            proof=regret,
            extra=lambda: {"reward/mean": seen["reward"]},
            steps=260,
            loss_key="policy/loss",
        )

    _, notes, twin = both(make, recorder, draw)
    return broken(
        notes.end > 1.3 * notes.proof[0] and twin.end < 0.5 * twin.proof[0],
        f"regret {notes.proof[0]:.3g} -> {notes.end:.3g}, with the right sign {twin.end:.3g}",
        tolerated=("divergence", "plateau", "activation_collapse", "vanishing_gradients"),
        onset_step=0,
    )


def updates_rounded_away(recorder: Recorder, draw: Draw) -> Truth:
    """Gopher, appendix C: bfloat16 parameters without float32 copies; small updates are lost."""

    def make(made: Draw, faulty: bool) -> Course:
        data = datasets.load_digits(made.stream("data"), noise=0.1).flatten()
        kind = torch.bfloat16 if faulty else torch.float32
        parts = {name: getattr(data, name).to(kind) for name in ("x", "val_x", "proof_x")}
        data = replace(data, **parts)
        width = made.integer(32, 64)
        model = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 10),
        )  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                # As after a pretraining: no weight so near 0 that a small update shows in it.
                parameter.add_(0.05 * parameter.sign())
        rate = 1e-4 - 4e-5 * made.severity
        optimizer = torch.optim.Adam(model.to(kind).parameters(), lr=rate)

        def measure(output: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(output.float(), target)

        return supervise(made, model, data, optimizer, measure=measure, steps=380)

    course, notes, twin = both(make, recorder, draw)
    names = [name for name, p in course.model.named_parameters() if p.dim() == 2]
    still = [float(np.mean(np.array(notes.ratios[name]) == 0.0)) for name in names]
    late = float(calm(notes.proof)[len(notes.proof) // 3]) - notes.end
    return broken(
        given_away(notes, twin) > 0.2,
        f"share of looks at which a whole weight matrix did not change in one bit: "
        f"{', '.join(f'{share:.0%}' for share in still)}; proof {notes.end:.3g} against "
        f"{twin.end:.3g} in float32, {late:.2g} gained in the last two thirds",
        tolerated=("stagnant_layers", "plateau", "update_ratio", "optimizer_not_stepping"),
        onset_step=0,
    )


SCENARIOS = (
    Scenario(
        name="fourth/gradients_not_cleared/zero_grad_forgotten",
        kind="fault",
        train=zero_grad_forgotten,
    ),
    Scenario(
        name="fourth/optimizer_not_stepping/counter_never_full",
        kind="fault",
        train=counter_never_full,
    ),
    Scenario(
        name="fourth/training_mode_in_evaluation/validated_while_training",
        kind="fault",
        train=validated_while_training,
    ),
    Scenario(
        name="fourth/parameters_not_optimized/head_replaced_after_the_optimizer",
        kind="fault",
        train=head_replaced_after_the_optimizer,
    ),
    Scenario(
        name="fourth/mostly_frozen/frozen_by_a_loop_too_wide",
        kind="fault",
        train=frozen_by_a_loop_too_wide,
    ),
    Scenario(
        name="fourth/mislabelled_data/files_sorted_apart", kind="fault", train=files_sorted_apart
    ),
    Scenario(
        name="fourth/constant_inputs/divided_as_integers", kind="fault", train=divided_as_integers
    ),
    Scenario(name="fourth/wrong_loss/target_broadcast", kind="fault", train=target_broadcast),
    Scenario(name="fourth/wrong_sign/reward_pushed_down", kind="fault", train=reward_pushed_down),
    Scenario(
        name="fourth/lost_updates/updates_rounded_away", kind="fault", train=updates_rounded_away
    ),
)
