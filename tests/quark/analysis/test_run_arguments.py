"""What a command line sets, and what counts as a seed: by one rule, however it was passed."""

import shlex

import pytest

from quark.analysis.comparison.changes import fold_arguments, parse_arguments
from quark_core.records.runs import digest_config, digest_environment, is_seed

SEEDS = """
    seed SEED data.seed shuffle_seed random-seed randomSeed RandomSeed randomseed manual_seed
    trainer.seed rng prng_key random_state randomState estimator.random_state seed_everything
    seed.torch seeds.numpy PYTHONHASHSEED variables.PYTHONHASHSEED PL_GLOBAL_SEED seed_value
"""
SETTINGS = """
    lr seeds num_seeds linseed reseed random_crop random.erase orange random_flip speed seedling
    model.random n_random random_state_dim use_random string.range
"""


@pytest.mark.parametrize("name", SEEDS.split())
def test_a_seed_is_known_by_its_name_and_parts_no_configurations(name):
    assert is_seed(name)
    assert digest_config({"lr": 1, name: 3}) == digest_config({"lr": 1, name: 4})
    assert digest_config({"lr": 1, name: 3}) == digest_config({"lr": 1})


@pytest.mark.parametrize("name", SETTINGS.split())
def test_a_setting_that_sounds_like_a_seed_is_none(name):
    assert not is_seed(name)
    assert digest_config({name: 3}) != digest_config({name: 4})


def test_the_seed_of_hashes_parts_no_environments():
    one, two = ({"variables": {"PYTHONHASHSEED": text, "OMP": "1"}} for text in "01")
    assert digest_environment(one) == digest_environment(two)
    assert digest_environment(one) != digest_environment({"variables": {"OMP": "2"}})


@pytest.mark.parametrize(
    "form",
    [
        "--seed 3", "seed=3", "--seed=3", "--set seed=3", "--set=seed=3", "-o seed=3", "-o=seed=3",
        "--cfg-options trainer.seed=3", "--cfg-options lr=1 trainer.seed=3", "--random-seed=3",
        "+seed=3", "++trainer.seed=3", "--trainer.seed 3", "-Dseed=3", "--opts LR 1 SEED 3",
        "--opts SEED 3 LR 1", "--fast seed=3", "--fast --seed=3", "x --seed 3 y",
        "--random_state 3", "seed 3",
    ],
)  # fmt: skip
def test_a_seed_is_found_however_it_was_passed(form):
    arguments = shlex.split(form)
    (found,) = [each for each in parse_arguments(arguments) if is_seed(each.name)]
    assert found.text == "3"
    # It stands where it says: what checks causes writes another one there.
    assert arguments[found.index] == f"{found.prefix}3"


def test_other_arguments_keep_their_names_and_places():
    given = shlex.split("--lr -0.1 --fast --url=http://a?b=c a.yaml -c b.yaml --flag width=8 9")
    found = [(each.name, each.text) for each in parse_arguments(given)]
    assert found == [
        ("lr", "-0.1"), ("fast", None), ("url", "http://a?b=c"), ("#1", "a.yaml"), ("c", "b.yaml"),
        ("flag", None), ("width", "8"), ("#2", "9"),
    ]  # fmt: skip


def test_odd_arguments_are_told_by_their_place():
    given = ["", "=", "---", "-", "--", "-=", "--=x"]
    assert [each.text for each in parse_arguments(given)] == given
    assert list(parse_arguments([])) == []


def test_an_argument_that_says_what_a_key_says_is_found_by_its_name():
    settings = {"optim.lr": 0.1, "amp": True, "width": 8}
    said = shlex.split("--lr 0.1 --no-amp amp=false --amp --width=9 --optim-lr 0.10")
    repeats, others = fold_arguments(said, settings)
    assert repeats == {"lr": "optim.lr", "no-amp": "amp", "amp": "amp", "optim-lr": "optim.lr"}
    assert [(each.name, each.text) for each in others] == [("amp", "false"), ("width", "9")]
