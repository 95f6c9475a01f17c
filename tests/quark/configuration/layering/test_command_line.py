"""The command line of a script with layers: both spellings of texts, JSON, never evaluated."""

import pytest

from quark import SchemaValidationError
from quark.configuration.layering.command_line import parse_value, read_command_line


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.01", 0.01),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("1_000", 1000),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ('"quoted"', "quoted"),
        ("%resnet101%", "resnet101"),
        ("%1.0%", "1.0"),
        ("%%", ""),
        ("%[a]%", "[a]"),
        ("resnet101", "resnet101"),
        ("a=b", "a=b"),
        ("", ""),
        ("007", "007"),
        ("2026-05-07", "2026-05-07"),
        ("9" * 6000, "9" * 6000),
        ("__import__('os').system('true')", "__import__('os').system('true')"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
    ],
)
def test_a_value_is_json_or_else_a_word(text, value):
    found = parse_value(text, "x=")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["[a, b]", "{a: 1}", "[" * 5000, '{"a": 1'])
def test_half_a_list_is_a_mistake(text):
    with pytest.raises(SchemaValidationError, match="x= starts like JSON"):
        parse_value(text, "x=")


def test_what_is_too_long_is_refused():
    with pytest.raises(SchemaValidationError, match="1,000,001 characters"):
        parse_value("a" * 1_000_001, "x=")


def test_words_settings_and_options_are_told_apart():
    said = read_command_line(
        ["high_lr", "lr=0.1", "+new.key=x", "--batch-size", "64", "--name=adam", "--fast", "--low",
         "-1", "model.small", "--", "lr=9"]
    )  # fmt: skip
    assert said.layers == ["high_lr", "model.small"]
    assert [(each.key, each.value, each.insists) for each in said.settings] == [
        ("lr", 0.1, False),
        ("new.key", "x", True),
        ("batch_size", 64, False),
        ("name", "adam", False),
        ("fast", True, False),
        ("low", -1, False),
    ]
    assert not said.asks_for_manual


@pytest.mark.parametrize("word", ["manual", "--manual", "--help", "-h"])
def test_the_manual_has_several_names(word):
    assert read_command_line(["a", word]).asks_for_manual


def test_a_short_option_belongs_to_a_parser():
    with pytest.raises(SchemaValidationError, match=r"'-x' on the command line.*parser"):
        read_command_line(["-x"])
    with pytest.raises(SchemaValidationError, match="argv must be a list of str"):
        read_command_line([3])
