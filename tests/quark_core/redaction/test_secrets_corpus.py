"""Three hundred secrets in every shape and place: none is kept, and a thousand ordinary values are.

    python tests/quark_core/redaction/test_secrets_corpus.py

prints the figures.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from secrets_corpus import COMMAND_LINES, NAMES, SHAPES, Planted, list_secrets, read_ordinary_config

from quark_core.config.redaction import (
    REDACTED,
    redact_arguments,
    redact_shapes,
    redact_text,
    redact_values,
)

REDACT: dict[str, Callable[[Any], Any]] = {
    "values": redact_values,
    "argv": redact_arguments,
    "text": redact_text,
}
# A list of words, of which some are names of secrets.
FALSE = ["vocab"]


def find_kept(planted: Planted) -> bool:
    """Whether a secret, or a line of it, is still there after the redaction."""
    shown = str(REDACT[planted.form](planted.content))
    return any(line in shown for line in planted.secret.splitlines() if "-----" not in line)


def find_false() -> list[str]:
    """Keys of ordinary configs whose value was taken for a secret."""
    return [
        key for key, value in read_ordinary_config() if redact_values({key: value}) != {key: value}
    ]


def test_no_secret_of_three_hundred_is_kept():
    secrets = list_secrets()

    assert len(secrets) >= 300
    assert len({planted.secret for planted in secrets}) == len(secrets)
    assert [planted.name for planted in secrets if find_kept(planted)] == []


def test_a_thousand_ordinary_values_stay():
    assert len(read_ordinary_config()) >= 1000
    assert find_false() == FALSE


def test_ordinary_values_stay_together_too():
    """A name that stands above another must not make a secret of it."""
    ordinary = [(key, value) for key, value in read_ordinary_config() if key not in FALSE]
    config = {"model": dict(ordinary), "runs": [dict(ordinary)]}

    assert redact_values(config) == config


def test_what_is_redacted_says_so_and_stays_so():
    for planted in list_secrets():
        redact = REDACT[planted.form]
        once = redact(planted.content)

        assert REDACTED in str(once), planted.name
        assert redact(once) == once, planted.name


@pytest.mark.parametrize("before", ["", "see ", "x=", "(", '"', "/", "\n", ":"])
def test_a_shape_is_seen_wherever_it_stands(before):
    for name, secret in SHAPES.items():
        for after in ("", " was refused", ")", '"', ",", "\n", "<"):
            shown = redact_text(f"{before}{secret}{after}")

            assert secret not in shown, (name, after)
            assert REDACTED in shown, (name, after)


def test_what_is_no_secret_value_stays_under_any_name():
    for name in NAMES:
        for value in (None, True, False, ""):
            assert redact_values({name: value}) == {name: value}


def test_a_shape_is_seen_in_a_key_and_no_key_is_lost():
    first, second = SHAPES["github"], SHAPES["gitlab"]
    redacted = redact_values({first: 1, second: 2, "lr": 0.1})

    assert list(redacted.values()) == [1, 2, 0.1]
    assert first not in str(redacted)
    assert second not in str(redacted)
    assert redact_shapes(first) == REDACTED


@pytest.mark.parametrize(
    "text",
    [
        "| password | str | the user's password |",
        "| token | what a text is cut into |",
        "secrets:\n  wandb:\n    entity: team",
        "the password:\nis too short for us",
        "token:\nfoo",
        "tokens    loss",
        "a key-value store, and key-frames of 32 characters",
        "key_data | 12 rows",
        "the loss went down",
        "825a948c1f6de2ab4c0b43f6fd4e3f4a7f5b2d11",
        "risk-assessment-of-the-baseline-model",
        "sk-learn-random-forest-baseline",
        "qk_norm_with_learned_temperature",
        "hf_internal_testing/tiny_random_bert",
        "git@github.com:org/repo.git",
        "https://github.com/org/repo?tab=readme",
        "https://example.com/list?next_token=abc&page=2",
        "s3://bucket/path@v1/train.parquet",
        "ada@example.com",
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----",
    ],
)
def test_what_names_no_value_stays(text):
    assert redact_text(text) == text
    assert redact_values({"note": text}) == {"note": text}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_under_a_secret_name_goes(name):
    assert redact_values({name: "s3cr3t"}) == {name: REDACTED}


@pytest.mark.parametrize("value", ["s3cr3t", 12345, 1.5, "True story"])
def test_a_password_goes_whatever_it_is(value):
    assert redact_values({"password": value}) == {"password": REDACTED}


def test_secrets_go_at_any_depth_and_nothing_else_does():
    values = {
        "optimizer": {"lr": 0.1, "name": "adam"},
        "tracking": [{"url": "https://x.io", "api_key": "s3cr3t"}, {"hf_token": "s3cr3t"}],
        "env": {"inner": {"headers": {"Authorization": "Bearer s3cr3t", "Accept": "text"}}},
    }
    before = copy.deepcopy(values)
    redacted = redact_values(values)

    assert "s3cr3t" not in str(redacted)
    assert redacted["optimizer"] == values["optimizer"]
    assert redacted["tracking"][0]["url"] == "https://x.io"
    assert redacted["env"]["inner"]["headers"]["Accept"] == "text"
    assert values == before


@pytest.mark.parametrize(
    "values",
    [
        {"password": ["s3cr3t", "s3cr3t too"]},
        {"secrets": {"wandb": "s3cr3t"}},
        {"credentials": {"user": "ada", "value": "s3cr3t"}},
        {"api_keys": {"openai": "s3cr3t"}},
        {"secrets": [{"name": "wandb", "value": "s3cr3t"}]},
    ],
    ids=repr,
)
def test_whatever_lies_below_a_secret_key_goes(values):
    assert "s3cr3t" not in str(redact_values(values))


@pytest.mark.parametrize("secret", SHAPES.values(), ids=list(SHAPES))
def test_a_token_goes_by_its_shape_wherever_it_stands(secret):
    assert redact_text(secret) == REDACTED
    assert redact_text(f"login with {secret} failed") == f"login with {REDACTED} failed"
    assert redact_values({"note": [f"key={secret};"]}) == {"note": [f"key={REDACTED};"]}
    assert secret not in str(redact_arguments(["train.py", f"--note={secret}"]))


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH "])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut off"])
def test_a_private_key_goes(kind, whole):
    end = f"-----END {kind}PRIVATE KEY-----\nafter" if whole else ""
    text = redact_text(f"before\n-----BEGIN {kind}PRIVATE KEY-----\nMIIE\ns3cr3t\n{end}")

    assert "s3cr3t" not in text
    assert text.startswith("before")
    assert text.endswith("after") is whole


SECRET_URLS = [
    ("https://ada:s3cr3t@example.com/x", "https://[redacted]@example.com/x"),
    ("https://s3cr3t@example.com", "https://[redacted]@example.com"),
    ("postgresql+psycopg://u:s3cr3t@db:5432/runs", "postgresql+psycopg://[redacted]@db:5432/runs"),
    ("postgresql://u:s3c@r3t@db/runs", "postgresql://[redacted]@db/runs"),
    ("redis://:s3cr3t@cache:6379/0", "redis://[redacted]@cache:6379/0"),
    ("https://x.io/a?api_key=s3cr3t&page=2", "https://x.io/a?api_key=[redacted]&page=2"),
    ("https://x.io/a?page=2&token=s3cr3t#top", "https://x.io/a?page=2&token=[redacted]#top"),
    ("see https://u:s3cr3t@a.io and http://u:t0p@b.io", None),
]


@pytest.mark.parametrize(("url", "redacted"), SECRET_URLS, ids=[url for url, _ in SECRET_URLS])
def test_secrets_of_urls_go_and_the_rest_stays(url, redacted):
    found = redact_text(url)

    assert "3cr3t" not in found
    assert "r3t" not in found
    assert "t0p" not in found
    assert redacted is None or found == redacted


@pytest.mark.parametrize("words", COMMAND_LINES, ids=" ".join)
def test_secrets_of_a_command_line_go(words):
    redacted = redact_arguments([word.format("s3cr3t") for word in words])

    assert "s3cr3t" not in " ".join(redacted)
    assert len(redacted) == len(words)
    assert REDACTED in " ".join(redacted)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--lr", "0.1", "--tokenizer", "gpt2", "--num-tokens", "5", "-v"],
        ["--max-token-len=5", "--pad-token=<pad>", "--token-type", "bert", "seed=1"],
        ["--cls-token", "[CLS]", "model.eos_token=</s>", "--author", "Ada", "--keyboard=qwerty"],
        ["--use-password", "--lr", "0.1"],
    ],
    ids=" ".join,
)
def test_a_harmless_command_line_stays(arguments):
    assert redact_arguments(arguments) == arguments


def test_redacting_twice_changes_nothing_more():
    values = {"api_key": "s3cr3t", "url": "https://u:s3cr3t@a.io/?token=s3cr3t", "n": [1, "x"]}
    once = redact_values(values)

    assert redact_values(once) == once


if __name__ == "__main__":
    every, ordinary = list_secrets(), read_ordinary_config()
    kept = [planted.name for planted in every if find_kept(planted)]
    print(f"kept {len(kept)} of {len(every)} secrets", *kept, sep="\n  ")
    print(
        f"false {len(find_false())} of {len(ordinary)} ordinary values", *find_false(), sep="\n  "
    )
