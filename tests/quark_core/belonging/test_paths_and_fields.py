"""What paths of groups and fields may be."""

import pytest

from quark_core.config.arguments import check_fields, check_group_path, check_groups, is_below
from quark_core.errors import SchemaValidationError


@pytest.mark.parametrize(
    "path", ["", " ", "/", "/paper", "paper/", "paper//fig3", "paper/ fig3", "a\nb", "a\x1b[31mb",
             "x" * 251, "/".join("abcdefghijklmnopqrst"), None, 3, b"paper"],
)  # fmt: skip
def test_a_path_that_no_group_can_have_is_refused_by_name(path):
    with pytest.raises(SchemaValidationError, match="group"):
        check_group_path(path)


def test_one_path_or_several_are_groups_sorted_and_each_once():
    assert check_groups("paper/fig3") == ("paper/fig3",)
    assert check_groups(["b", "a/x", "b"]) == ("a/x", "b")
    assert check_groups(None) == ()
    with pytest.raises(SchemaValidationError, match=r"group\[1\]"):
        check_groups(["a", "b/"])
    with pytest.raises(SchemaValidationError, match="group must be a str or an iterable"):
        check_groups(3)


def test_a_path_is_below_itself_and_not_below_a_name_that_begins_alike():
    assert is_below("paper", "paper")
    assert is_below("paper/fig3", "paper")
    assert not is_below("paper2/fig3", "paper")


def test_fields_keep_their_types():
    kept = check_fields(
        {"gpu": "V100", "count": 8, "share": 0.5, "amp": True, "note": None, "sizes": [1, {"a": 2}]}
    )
    assert kept == {
        "gpu": "V100", "count": 8, "share": 0.5, "amp": True, "note": None, "sizes": [1, {"a": 2}],
    }  # fmt: skip
    assert type(kept["amp"]) is bool
    assert type(kept["count"]) is int


def test_secrets_in_fields_are_redacted():
    kept = check_fields({"api_key": "sk-0123456789abcdef0123456789abcdef", "gpu": "V100"})
    assert "0123456789abcdef" not in str(kept)
    assert kept["gpu"] == "V100"


@pytest.mark.parametrize(
    "fields", [[("a", 1)], {"": 1}, {"a\nb": 1}, {" a": 1}, {3: 1}, {"a": object()},
               {"a": "x" * 20_000}, dict.fromkeys(map(str, range(1001)), 1)],
)  # fmt: skip
def test_fields_that_cannot_be_kept_are_refused_by_name(fields):
    with pytest.raises(SchemaValidationError, match="fields"):
        check_fields(fields)
