"""Three hundred secrets in every shape and place: none is kept, and a thousand ordinary values are.

    python tests/quark_core/redaction/test_secrets_corpus.py

prints the figures.
"""

from collections.abc import Callable
from typing import Any

import pytest
from secrets_corpus import NAMES, SHAPES, Planted, list_secrets, read_ordinary_config

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
MOST_FALSE = 2


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
    assert len(find_false()) <= MOST_FALSE, find_false()


def test_ordinary_values_stay_together_too():
    """A name that stands above another must not make a secret of it."""
    false = find_false()
    ordinary = [(key, value) for key, value in read_ordinary_config() if key not in false]
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
    ],
)
def test_tables_and_lines_that_name_no_value_stay(text):
    assert redact_text(text) == text


if __name__ == "__main__":
    every, ordinary = list_secrets(), read_ordinary_config()
    kept = [planted.name for planted in every if find_kept(planted)]
    print(f"kept {len(kept)} of {len(every)} secrets", *kept, sep="\n  ")
    print(
        f"false {len(find_false())} of {len(ordinary)} ordinary values", *find_false(), sep="\n  "
    )
