"""`ranks=` of a session and of a backend: words, lists, texts, and which of them wins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quark
from quark_core.backends.contract import BackendDefinition, RankPolicy
from quark_core.backends.registry import default_registry
from quark_core.errors import SchemaValidationError
from quark_core.ranks.launches import ALL_RANKS, RANK_ZERO, RankInfo, choose_ranks, parse_ranks
from quark_core.runs.backend_choice import choose_backend, plan_backends


@pytest.mark.parametrize(
    ("given_ranks", "included", "leader", "text"),
    [
        ("zero", {0}, 0, "zero"),
        (" ALL ", {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 0, "all"),
        ([3, 1, 3], {1, 3}, 1, "1,3"),
        ("2-4,8", {2, 3, 4, 8}, 2, "2-4,8"),
        ("0 8+9", {0, 8, 9}, 0, "0,8-9"),
        (range(2), {0, 1}, 0, "0-1"),
        ((0,), {0}, 0, "zero"),
    ],
)
def test_ranks_are_words_lists_or_texts(given_ranks, included, leader, text):
    choice = parse_ranks(given_ranks, "ranks")
    assert {rank for rank in range(10) if choice.includes(rank)} == included
    assert (choice.leader, str(choice)) == (leader, text)


@pytest.mark.parametrize(
    "bad", ["", "none", "1-", "3-1", "-1", [], [-1], [True], ["0"], [1.0], 3, 1.5, [10**9], "0,,x"]
)
def test_bad_ranks_are_refused_by_name(bad, tmp_path):
    with pytest.raises(SchemaValidationError, match="ranks"):
        quark.start_run(project="p", storage_dir=tmp_path, ranks=bad)
    assert list(tmp_path.iterdir()) == []


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=40))
def test_a_choice_and_its_text_mean_the_same(ranks):
    choice = parse_ranks(ranks, "ranks")
    assert parse_ranks(str(choice), "ranks") == choice
    assert all(choice.includes(rank) for rank in ranks)
    assert sum(last - first + 1 for first, last in choice.spans) == len(ranks)
    assert choice.leader == min(ranks)


def test_the_variable_is_the_default(monkeypatch):
    assert choose_ranks(None) is None
    monkeypatch.setenv("QUARK_RANKS", "all")
    assert choose_ranks(None) == ALL_RANKS
    assert choose_ranks("zero") == RANK_ZERO
    monkeypatch.setenv("QUARK_RANKS", "some")
    with pytest.raises(SchemaValidationError, match="QUARK_RANKS"):
        choose_ranks(None)


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("csv:./out?ranks=0-1", "./out"),
        ("csv:./out?x=1&ranks=0+1", "./out"),
        ("mlflow+http://host:5000?ranks=0-1", "http://host:5000"),
        ("mlflow+http://host:5000?ranks=0-1&token=a", "http://host:5000?token=a"),
        ("https://host/quark?ranks=0%2C1", "https://host/quark"),
    ],
)
def test_a_backend_does_not_see_its_ranks(text, location):
    choice = choose_backend(text, default_registry())
    assert choice.location == location
    assert "ranks" not in dict(choice.options)
    assert [choice.ranks.includes(rank) for rank in (0, 1, 2)] == [True, True, False]
    # What asks for it again, in a journal or a context, has them still.
    assert choice.specification == text


def names(rank, backends, ranks):
    chosen = None if ranks is None else parse_ranks(ranks, "ranks")
    plan = plan_backends(backends, RankInfo(rank, rank, 4), ranks=chosen)
    return [choice.definition.name for choice in plan.choices]


@pytest.mark.parametrize(
    ("backends", "ranks", "zero", "one"),
    [
        ("csv", None, ["embedded", "csv"], []),
        ("csv", "all", ["embedded", "csv"], ["embedded", "csv"]),
        ("mlflow", "all", ["embedded", "mlflow"], ["embedded"]),
        ("mlflow:x?ranks=all", None, ["embedded", "mlflow"], ["mlflow"]),
        ("csv:x?ranks=1", "all", ["embedded"], ["embedded", "csv"]),
        ("embedded:?ranks=all", None, ["embedded"], ["embedded"]),
        ("embedded:?ranks=zero,mlflow", "all", ["embedded", "mlflow"], []),
        ("mlflow", [1, 2], [], ["embedded", "mlflow"]),
        ("none", "all", [], []),
    ],
)
def test_a_backends_own_ranks_win_then_the_sessions_then_its_policy(backends, ranks, zero, one):
    assert names(0, backends, ranks) == zero
    assert names(1, backends, ranks) == one


def test_a_backend_for_every_rank_is_there_unless_the_session_says_otherwise():
    registry = default_registry()
    everywhere = BackendDefinition(
        name="everywhere",
        summary="",
        open=lambda config: None,
        rank_policy=RankPolicy.ALL,
        own_process=False,
    )

    class Registry:
        names = registry.names
        find_default_primary = registry.find_default_primary

        def find(self, name):
            return everywhere if name == "everywhere" else registry.find(name)

    def plan(ranks):
        return plan_backends("everywhere", RankInfo(1, 1, 2), Registry(), ranks=ranks).mirrors

    assert [choice.definition.name for choice in plan(None)] == ["everywhere"]
    assert plan(RANK_ZERO) == ()
    assert len(plan(ALL_RANKS)) == 1
