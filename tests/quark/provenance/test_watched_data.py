"""Loaders that are watched: which samples came, in which order, and that nothing is altered."""

import numpy as np
import pytest

import quark
from quark.provenance.fingerprint_comparison import compare_fingerprints
from quark_core.records.query import Query

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


def make_loader(seed=0, *, shuffle=True, altered=False, **arguments):
    images = torch.arange(4000.0).reshape(100, 40)
    if altered:
        images[57, 13] += 1
    return DataLoader(
        TensorDataset(images, torch.arange(100)),
        batch_size=8,
        shuffle=shuffle,
        generator=torch.Generator().manual_seed(seed),
        **arguments,
    )


@pytest.fixture
def train(tmp_path):
    """Goes through loaders in a run of its own, and returns the fingerprints."""

    def run(loader, *, passes=1, leave_at=None, **arguments):
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            watched = quark.watch_data(loader, **arguments)
            for _ in range(passes):
                for number, _batch in enumerate(watched):
                    if number == leave_at:
                        break
        read = quark.open_run(session.id, tmp_path).open_run.read("fingerprint", Query())
        return [one for one in read.to_records() if one.subject == "data"]

    return run


def judge(one, other):
    (found,) = compare_fingerprints(one, other)
    return found


def test_the_same_samples_in_another_order_are_an_answer_of_their_own(train):
    base = train(make_loader(0))
    assert judge(base, train(make_loader(0))).verdict == "same"
    assert judge(base, train(make_loader(0))).is_ruled_out
    assert judge(base, train(make_loader(1))).verdict == "other_order"
    assert judge(base, train(make_loader(shuffle=False))).verdict == "other_order"
    assert judge(base, train(make_loader(0, altered=True))).verdict == "different"
    assert judge(base, train(make_loader(1, altered=True))).verdict == "different"


def test_workers_change_nothing(train):
    found = train(make_loader(0, num_workers=2))
    assert judge(train(make_loader(0)), found).verdict == "same"


def test_each_pass_has_a_fingerprint_and_they_part_where_they_part(train):
    base = train(make_loader(0), passes=3)
    assert [one.metadata["pass"] for one in base] == [0, 1, 2]
    assert [one.metadata["samples"] for one in base] == [100, 100, 100]
    loader = make_loader(0)
    with_other = train(loader, passes=1) + [
        one for one in train(make_loader(5), passes=3) if one.metadata["pass"]
    ]
    found = judge(base, with_other)
    assert (found.verdict, found.step) == ("other_order", 1)


def test_a_pass_that_is_left_early_is_compared_as_far_as_it_went(train):
    base, early = train(make_loader(0)), train(make_loader(0), leave_at=6)
    assert early[0].metadata["whole"] is False
    assert early[0].metadata["batches"] == 7
    found = judge(base, early)
    assert (found.verdict, found.is_ruled_out) == ("unknown", False)
    assert found.words == "the first 4 batches are the same; a pass was left early"
    assert judge(base, train(make_loader(3), leave_at=6)).verdict == "different"


def test_samples_that_are_large_are_looked_at_in_places_which_rules_nothing_out(train):
    images = torch.zeros(16, 3, 64, 64)

    def load(alter):
        changed = images.clone()
        changed[9, 1, 5, 5] = alter
        return DataLoader(TensorDataset(changed), batch_size=1)

    found = judge(train(load(0)), train(load(1)))
    assert (found.verdict, found.is_ruled_out) == ("same", False)
    assert found.level == "stream:places"


def test_ids_are_digested_where_they_are_given(train):
    def load(order):
        return [{"id": [f"s{n}" for n in part], "x": object()} for part in order]

    base = train(load([(0, 1), (2, 3)]), sample_ids="id")
    assert base[0].level == "stream:ids"
    other = train(load([(3, 2), (1, 0)]), sample_ids=lambda batch: batch["id"])
    assert judge(base, other).verdict == "other_order"
    assert judge(base, train(load([(0, 1), (2, 4)]), sample_ids="id")).verdict == "different"


def test_a_watched_loader_is_the_loader(train, tmp_path):
    loader = make_loader(0)
    expected = [[part.clone() for part in batch] for batch in make_loader(0)]
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        watched = session.watch_data(loader, "val")
        assert len(watched) == len(loader)
        assert watched.batch_size == 8
        assert watched.dataset is loader.dataset
        watched.marked = 5
        assert loader.marked == 5
        for batch, wanted in zip(watched, expected, strict=True):
            assert type(batch) is list
            assert all(torch.equal(one, other) for one, other in zip(batch, wanted, strict=True))
        endless = quark.watch_data(n for n in range(3))
        assert endless
        with pytest.raises(TypeError):
            len(endless)
        assert list(endless) == [0, 1, 2]
    assert list(quark.TrainingSession.watch_data(session, [1, 2])) == [1, 2]


def test_what_a_loader_raises_passes_through_and_what_came_is_kept(train):
    def load():
        yield torch.arange(4)
        raise OSError("shard 3 is gone")

    class Loader:
        def __iter__(self):
            return load()

    kept = []
    try:
        train(Loader())
    except OSError as error:
        kept.append(str(error))
    assert kept == ["shard 3 is gone"]


def test_what_fails_in_watching_costs_a_warning_once_and_no_step(train, caplog):
    def explode(batch):
        raise KeyError("no ids here")

    assert train([torch.arange(2)] * 5, passes=2, sample_ids=explode) == []
    assert caplog.text.count("no longer watched") == 1


def test_batches_that_cannot_be_looked_at_are_told_and_never_the_same(train):
    base = train([object(), object()])
    assert base[0].level == "stream:count"
    assert judge(base, train([object(), object()])).verdict == "unknown"


def test_numbers_in_many_forms_are_samples(train):
    for batch in (
        {"x": np.arange(6).reshape(3, 2), "y": ["a", "b", "c"]},
        (torch.ones(3, 2, dtype=torch.bfloat16), [1, 2, 3]),
        [torch.ones(3, 700, dtype=torch.float64), torch.zeros(3)],
    ):
        (found,) = train([batch])
        assert found.metadata["samples"] == 3, found


def test_resumed_runs_go_on_with_passes_of_their_own(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        for _ in quark.watch_data(make_loader(0)):
            pass
        session.end_run("interrupted")
    with quark.resume_run(run_id=session.id, storage_dir=tmp_path) as again:
        for _ in quark.watch_data(make_loader(0)):
            break
    read = quark.open_run(session.id, tmp_path).open_run.read("fingerprint", Query())
    streams = [one for one in read.to_records() if one.level.startswith("stream")]
    assert [(one.attempt, one.metadata["whole"]) for one in streams] == [(0, True), (1, False)]
    assert again.id == session.id
