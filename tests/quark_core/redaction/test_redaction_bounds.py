"""What a redaction may not do: take long, raise, or change what it has redacted before.

Texts of a megabyte are made of what each rule begins with. In time that grows
with the square of the length any of them would take hours.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from secrets_corpus import COMMAND_LINES, NAMES, SHAPES, TEXTS, URLS

from quark_core.config.redaction import REDACTED, redact_arguments, redact_text, redact_values

MEGABYTE = 1_000_000
PIECES = (
    *("a 0 _ - . = : / @ \" ' \\ < > ; & ? # ~ + , ( [ { a- a. a= a: a_ =a :a -a /a .a").split(),
    *('a=" a=\' a=\\" :// a:// ://a ://a: ://a:a@ ://a:1/ ://@ http://a: ?a= ?sig= ;a=').split(),
    *('&token= password password= password=" password=\\" password=\\\\" --password --a').split(),
    *("--pass= -p -u -ua: --a= token= token: tokens= key key= pwd=/ Bearer Basic bearer").split(),
    *("login password' <password> <a> </ eyJ -eyJ eyJ. eyJa. sk- sk-a -sk- sk-proj- hf_").split(),
    *("ghp_ LTAI -LTAI EAAA -EAAA xai- SG. SG.a. dp. qk_ qk_a_ xoxb- SK 1// :AA -us Q~ M.").split(),
    *("12345678:AA abc1Q~ .atlasv1. pat -----BEGIN -----END PuTTY-User-Key-File- hvs.").split(),
    *('v1.0- A3- A3-AAAAAA -AAAAA 4b1d oy2 dapi authorization: cookie: Cookie:" cookie:<').split(),
    *("'a': {\"a\": password=[redacted] [redacted]").split(),
    *("a ", " ", "\t", "\n", "a\n", "password ", "password  ", "API key ", "key= ", "login a "),
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "login ", "password: \n"),
    *("-----BEGIN A PRIVATE KEY-----\n", "Bearer a", "Basic aaaaaaaa ", "token = "),
    *("machine a login b password c ", "ß", "é=", "\U0001d518", "\ud800", "\0", "\u202e"),
)


@pytest.mark.sampled
@pytest.mark.parametrize("first", "abcdefgh")
def test_a_hostile_text_is_done_soon(first):
    for piece in PIECES["abcdefgh".index(first) :: 8]:
        text = (piece * (MEGABYTE // 10 // len(piece)))[: MEGABYTE // 10]

        assert isinstance(redact_text(text), str)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "piece", ["a", "a=", "tokens=", 'password=\\"', "a://", "qk_", "-eyJ", "pwd=/", "-----BEGIN "]
)
def test_a_hostile_megabyte_is_done_soon(piece):
    text = (piece * (MEGABYTE // len(piece) + 1))[:MEGABYTE]

    assert isinstance(redact_text(text), str)


@pytest.mark.long
def test_a_long_command_line_and_a_long_name_are_done_soon():
    assert len(redact_arguments(["--password", "x", "-p"] * 10_000)) == 30_000
    assert redact_values({"x" * MEGABYTE: "y", "a_" * 100_000 + "password": "z"})
    assert redact_arguments(["-" * MEGABYTE, "--" + "a" * MEGABYTE + "=1"])


@pytest.mark.long
def test_a_secret_is_found_behind_a_megabyte():
    secret = SHAPES["github"]

    assert secret not in redact_text("x " * (MEGABYTE // 2) + secret)
    assert "hunter2" not in redact_text("x " * (MEGABYTE // 2) + "password=hunter2")


FRAGMENTS = st.sampled_from(
    [*PIECES, *TEXTS, *URLS, *NAMES, *SHAPES.values(), " ", "\n", "hunter2"]
)
HOSTILE_TEXTS = st.lists(FRAGMENTS | st.text(max_size=6), max_size=12).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | HOSTILE_TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HOSTILE_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(HOSTILE_TEXTS)
def test_a_text_redacted_twice_is_as_redacted_once(text):
    once = redact_text(text)

    assert redact_text(once) == once


@pytest.mark.long
@given(st.dictionaries(HOSTILE_TEXTS, JSON_VALUES, max_size=4))
def test_any_json_values_can_be_redacted_and_stay_json(values):
    before = json.dumps(values)
    redacted = redact_values(values)

    assert len(redacted) == len(values)
    assert json.loads(json.dumps(redacted)) == redacted
    assert json.dumps(values) == before


@given(st.lists(HOSTILE_TEXTS | st.sampled_from([w for line in COMMAND_LINES for w in line])))
def test_a_command_line_stays_as_long_as_it_is(arguments):
    assert len(redact_arguments(arguments)) == len(arguments)


@given(st.sampled_from(sorted(SHAPES.values())), HOSTILE_TEXTS, HOSTILE_TEXTS)
def test_a_shape_is_found_among_anything(secret, before, after):
    shown = redact_text(f"{before} {secret} {after}")

    assert f" {secret} " not in shown
    assert REDACTED in shown
