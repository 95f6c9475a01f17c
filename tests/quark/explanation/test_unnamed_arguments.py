"""A number without a name: when it is the seed, when it is a setting, and that it is said."""

import sys

import pytest

import quark
from quark.analysis.explanation.history import PastRun, find_seed_argument, settle_arguments
from quark.analysis.explanation.run_attributes import RunTraits, encode_seeds

LAUNCH = ("launch", "argv #1")


def make(number, text, value, *, extreme=None, script="train.py", **settings):
    values = {("config", key): each for key, each in settings.items()}
    values |= {LAUNCH: text}
    return PastRun(
        str(number), RunTraits(values, frozenset(), script=script, sections=frozenset({"argv"})),
        value, None, "completed", "digest", None, extreme=value if extreme is None else extreme,
    )  # fmt: skip


def list_places(runs):
    return [{place for place in run.traits.values if place[0] != "config"} for run in runs]


def test_a_number_that_alone_differs_is_the_seed_and_that_is_said():
    runs = settle_arguments([make(n, str(n), end, lr=1) for n, end in enumerate((0.3, 0.1, 0.2))])
    assert list_places(runs) == [{("seed", "argv #1")}] * 3
    assert len({run.seed for run in runs}) == 3
    assert len({run.sign_rest() for run in runs}) == 1
    assert "argument 1 is treated as the seed: 3 runs" in runs[0].traits.assumed[0]
    assert find_seed_argument(runs[0].traits) == "#1"
    assert runs[0].seed == encode_seeds(runs[0].traits)


@pytest.mark.parametrize(
    "runs",
    [
        # Results rise with it, as with a setting.
        [make(n, str(n), end, lr=1) for n, end in ((8, 0.1), (16, 0.2), (32, 0.3), (64, 0.4))],
        [make(n, str(n), end, lr=1) for n, end in ((1, 0.9), (2, 0.5), (3, 0.4))],
        # Two runs are no evidence.
        [make(n, str(n), end, lr=1) for n, end in enumerate((0.3, 0.1))],
        # Something else differs with it.
        [make(n, str(n), end, lr=2 * n + 1) for n, end in enumerate((0.3, 0.1, 0.2))],
        # It is no whole number.
        [make(n, f"0.{n}", end, lr=1) for n, end in enumerate((0.3, 0.1, 0.2))],
        [make(n, text, 0.3, lr=1) for n, text in enumerate(("resnet", "vit", "mlp"))],
        # Other scripts mean other things by it.
        [make(n, str(n), e, script=f"{n}.py", lr=1) for n, e in enumerate((0.3, 0.1, 0.2))],
    ],
)
def test_a_number_that_may_be_a_setting_is_no_seed(runs):
    assert list_places(settle_arguments(runs)) == [{LAUNCH}] * len(runs)


def test_ends_that_happen_to_rise_are_no_evidence_where_the_best_values_do_not():
    ends = zip((0.1, 0.2, 0.3, 0.4), (0.09, 0.2, 0.05, 0.3), strict=True)
    runs = [make(n, str(n), end, extreme=best, lr=1) for n, (end, best) in enumerate(ends)]
    assert list_places(settle_arguments(runs)) == [{("seed", "argv #1")}] * 4


def test_a_run_whose_seed_is_recorded_needs_no_other_one():
    runs = [make(n, str(n), end, lr=1) for n, end in enumerate((0.3, 0.1, 0.2))]
    for run in runs:
        run.traits.values["seed", "seed"] = 7
    assert all(LAUNCH in run.traits.values for run in settle_arguments(runs))


def test_an_argument_that_says_what_a_setting_says_in_every_run_is_folded_into_it():
    rates = ("0.02", "0.5", "1")
    runs = settle_arguments(
        [make(n, text, 0.3, lr=float(text), width=1) for n, text in enumerate(rates)]
    )
    assert list_places(runs) == [set()] * 3
    assert runs[0].traits.repeats == {"argv #1": ("config", "lr")}
    # One value alone is no evidence: it may be the width.
    runs = [make(n, "1", 0.3, lr=1, width=1) for n in range(3)]
    assert list_places(settle_arguments(runs)) == [{LAUNCH}] * 3


@pytest.fixture
def begin(project, monkeypatch):
    """Makes a run as if by a command line."""

    def run(*arguments, config, **options):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        # The seed of `Project.run` is that of its noise; the configuration says nothing of it.
        seed = options.pop("seed")
        level, noise = options.pop("level", 0.9), 0.003
        import numpy as np

        draw = np.random.default_rng(seed)
        end = level + noise * draw.standard_normal()
        with quark.start_run(
            project=project.name, storage_dir=project.root, config=config, **options
        ) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(30):
                wobble = 0.002 * draw.standard_normal()
                metrics.log("val/acc", end * (1 - 0.7 ** (step + 1)) + wobble, step=step)
        return session.run_id

    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    "form",
    ["--seed {0}", "--set seed={0}", "-o trainer.seed={0}", "+seed={0}", "--fast --seed={0}",
     "SEED {0}", "{0}", "-s {0}", "resnet {0}"],
)  # fmt: skip
def test_five_seeds_are_one_configuration_however_the_seed_was_passed(project, begin, form):
    seeds = [begin(*form.format(n).split(), config={"lr": 0.1}, seed=n + 40) for n in range(5)]
    worse = begin(*form.format(0).split(), config={"lr": 0.9}, seed=40, level=0.5)
    found = project.explain(seeds[0], worse)
    assert found.verdict == "worse"
    assert found.noise_floor is not None
    assert [(cause.place, cause.standing) for cause in found.causes] == [("lr", "probable")]
    is_unnamed = form in ("{0}", "-s {0}", "resnet {0}")
    assert any("is treated as the seed" in note for note in found.notes) == is_unnamed


def test_the_argument_of_a_setting_is_no_second_cause(project, begin):
    seeds = [begin("0.02", config={"rate": 0.02, "seed": n}, seed=n) for n in range(4)]
    worse = begin("0.5", config={"rate": 0.5, "seed": 0}, seed=0, level=0.4)
    found = project.explain(seeds[0], worse)
    assert [(cause.place, cause.repeats) for cause in found.causes] == [("rate", ("argv #1",))]
    compared = quark.ComparisonEngine.compare_runs(
        quark.open_run(worse, storage_dir=project.root),
        quark.open_run(seeds[0], storage_dir=project.root),
    )
    assert [change.path for change in compared.changes] == ["rate"]
