"""Parts are joined to rows of ascending steps, and each is sent once, whenever the process dies."""

import random

import msgspec
import pytest

from quark_backends.wandb.history import Part, StepRows, join_parts
from quark_backends.wandb.local_files import WandbState


def make_metric(mark, step, *keys, epoch=None, attempt=0):
    values = {"quark/time": 1.0, "quark/attempt": attempt, **dict.fromkeys(keys, 0.5)}
    if step is not None:
        values["quark/step"] = step
    if epoch is not None:
        values["quark/epoch"] = epoch
    axis = "" if step is not None else "quark/epoch"
    return Part(mark, values, axis, step=step, is_metric=True, epoch=epoch)


def make_layer(mark, step):
    values = {"quark/time": 1.0, "quark/attempt": 0, "quark/layer_step": step, "layers/a": 0.5}
    return Part(mark, values, "quark/layer_step", step=step)


class Life:
    """One process of the mirror: takes batches, sends rows into a file, and may die in between."""

    def __init__(self, saved, file, chance, mortality):
        self.state = msgspec.json.decode(saved, type=WandbState)
        self.rows = StepRows(self.state)
        self.file = file
        self.chance, self.mortality = chance, mortality
        self.found = {mark for marks in file[self.state.attempt + 1 :] for mark in marks[1]}
        self.rows.drop_found(self.found)
        self.sent = []

    def may_die(self):
        if self.chance.random() < self.mortality:
            raise InterruptedError

    def send(self, row):
        self.may_die()
        self.sent.append(row.step)
        self.file.append((row.step, [part.mark for part in row.parts]))
        join_parts(row.parts)
        self.may_die()

    def take(self, parts):
        for part in parts:
            if part.mark in self.found:
                self.rows.note_found(part)
        assert self.rows.add([part for part in parts if part.mark not in self.found]) is None
        for row in self.rows.release():
            self.send(row)

    def save(self):
        self.may_die()
        self.rows.save()
        self.state.attempt = len(self.file) - 1  # here: how far the file is acknowledged
        return msgspec.json.encode(self.state)


def list_batches(chance, count):
    """Batches as a tick makes them: of metrics, then of layers that are a little late."""
    batches, step = [], 0
    for tick in range(count):
        steps = range(step, step + chance.randint(1, 6))
        # The last step may go on in the next tick, with another key.
        step = steps.stop - chance.randint(0, 1)
        name = f"w.{2 * tick}"
        metrics = [make_metric(f"{name}.{i}", s, f"key{tick}") for i, s in enumerate(steps)]
        batches.append(metrics)
        batches.append([make_layer(f"w.{2 * tick + 1}.{i}", s) for i, s in enumerate(steps)])
    return batches


@pytest.mark.parametrize("seed", range(30))
def test_every_part_is_sent_once_wherever_processes_die(seed):
    chance = random.Random(seed)
    batches = list_batches(chance, 20)
    saved, file, done, lives = msgspec.json.encode(WandbState()), [], 0, 0
    while True:
        mortality = 0.05 if lives < 60 else 0.0
        life = Life(saved, file, chance, mortality)
        lives += 1
        try:
            while done < len(batches):
                group = chance.randint(1, 5)
                for parts in batches[done : done + group]:
                    life.take(parts)
                saved = life.save()
                done = min(done + group, len(batches))
            for row in life.rows.flush():
                life.send(row)
            break
        except InterruptedError:
            assert life.sent == sorted(set(life.sent))
    assert life.sent == sorted(set(life.sent))
    marks = [mark for _, row in file for mark in row]
    assert sorted(marks) == sorted(part.mark for parts in batches for part in parts)
    wanted = {part.mark: part.step for parts in batches for part in parts if part.is_metric}
    assert all(wanted.get(mark, step) == step for step, row in file for mark in row)
    assert life.rows.is_empty


def test_a_step_that_comes_too_late_says_why_and_keeps_everything():
    rows = StepRows(WandbState())
    for number, step in enumerate((1, 2, 3)):
        assert rows.add([make_metric(f"w.{number}.0", step, "loss")]) is None
    sent = [part.mark for row in rows.release() for part in row.parts]
    assert sent == ["w.0.0"]
    assert rows.add([make_metric("w.3.0", 0, "loss")]) == "step 0 arrived after step 1"
    assert sorted(part.mark for part in rows.give_up()) == ["w.1.0", "w.2.0", "w.3.0"]
    assert rows.is_empty


def test_epochs_stand_beside_the_step_that_they_came_after():
    rows = StepRows(WandbState())
    parts = []
    for step in range(6):
        parts.append(make_metric(f"w.0.{len(parts)}", step, "loss"))
        if step % 2:
            parts.append(make_metric(f"w.0.{len(parts)}", None, "val", epoch=step // 2))
    assert rows.add(parts) is None
    found = {
        row.step: part.values["quark/epoch"]
        for row in rows.flush()
        for part in row.parts
        if "val" in part.values
    }
    assert found == {1: 0, 3: 1, 5: 2}


def test_more_riders_than_rows_are_told_and_none_is_lost():
    rows = StepRows(WandbState())
    assert rows.add([make_metric("w.0.0", 0, "loss")]) is None
    riders = [make_layer(f"w.1.{index}", 100 + index) for index in range(2002)]
    assert "more values arrived for its steps" in rows.add(riders)
    assert len(rows.give_up()) == 2003
