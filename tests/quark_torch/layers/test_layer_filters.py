"""Which modules are chosen, under which names, and at which steps."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from quark import HookScheduleConfig, LayerFilterConfig
from quark_core.errors import SchemaValidationError
from quark_torch.layer_filter import describe_type, name_modules, select_modules, strip_prefixes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
        self.head = nn.Linear(2, 2)


def names(model, **filters):
    return [chosen.name for chosen in select_modules(model, LayerFilterConfig(**filters))]


ALL = ["body.0", "body.1", "body.2", "head"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, ALL),
        ({"leaf_modules_only": False}, ["(model)", "body", *ALL]),
        ({"include_names": ("head", "body.1")}, ["body.1", "head"]),
        ({"exclude_names": ("head",)}, ALL[:3]),
        ({"include_types": ("Conv2d", "Linear")}, ["body.0", "body.2", "head"]),
        ({"include_types": ("torch.nn.Conv2d",)}, ["body.0", "body.2"]),
        ({"include_types": ("torch.nn.modules.conv.Conv2d",)}, ["body.0", "body.2"]),
        ({"exclude_types": ("ReLU",)}, ["body.0", "body.2", "head"]),
        ({"include_name_patterns": (r"^body\.\d$",)}, ALL[:3]),
        ({"include_name_patterns": ("1",), "include_names": ("head",)}, ["body.1", "head"]),
        ({"include_name_patterns": ("body",), "include_types": ("Conv2d",)}, ["body.0", "body.2"]),
        ({"exclude_name_patterns": ("0$", "head")}, ["body.1", "body.2"]),
        ({"include_types": ("Sequential",)}, []),
        ({"include_types": ("Sequential",), "leaf_modules_only": False}, ["body"]),
        ({"include_types": ["Linear"]}, ["head"]),
    ],
)
def test_filters(filters, expected):
    assert names(Net(), **filters) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("include_name_patterns", ("(",), "invalid regular expression"),
        ("exclude_name_patterns", ("*",), "invalid regular expression"),
        ("include_types", "Linear", "tuple of str"),
        ("include_types", (nn.Linear,), "tuple of str"),
        ("exclude_names", 5, "tuple of str"),
        ("leaf_modules_only", 1, "True or False"),
    ],
)
def test_bad_filters_name_their_field(field, value, message):
    with pytest.raises(SchemaValidationError, match=f"^{field} .*{message}"):
        LayerFilterConfig(**{field: value})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.fc1.weight", "fc1.weight"),
        ("_orig_mod.module.fc1", "fc1"),
        ("module._orig_mod.fc1", "fc1"),
        ("blocks.0._checkpoint_wrapped_module.fc", "blocks.0.fc"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", "a.b"),
        ("body.module.fc1", "body.module.fc1"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_prefixes_of_names(name, expected):
    assert strip_prefixes(name) == expected


def test_wrappers_are_looked_through():
    class HasModule(nn.Module):
        """Its own child is called `module`, and is no wrapper's."""

        def __init__(self):
            super().__init__()
            self.module = Net()

    model = HasModule()
    model.module.body[0] = checkpoint_wrapper(model.module.body[0])
    model.module.head = torch.compile(model.module.head, backend="eager")
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    expected = [f"module.{name}" for name in ALL]
    assert names(wrapped) == expected
    assert names(wrapped, include_names=("module.head",)) == ["module.head"]
    assert names(wrapped, leaf_modules_only=False) == [
        "(model)",
        "module",
        "module.body",
        *expected,
    ]
    kinds = {
        chosen.name: describe_type(chosen.module)
        for chosen in select_modules(wrapped, LayerFilterConfig())
    }
    assert kinds["module.body.0"] == "Conv2d"
    assert kinds["module.head"] == "Linear"


def test_parametrized_modules_are_leaves_of_their_own_type():
    model = Net()
    torch.nn.utils.parametrizations.weight_norm(model.head)
    assert names(model) == ALL
    assert names(model, include_types=("Linear",)) == ["head"]
    assert describe_type(model.head) == "Linear"


def test_aliases_and_cycles():
    model = Net()
    model.tail = model.head
    model.body.append(model.head)
    (head,) = select_modules(model, LayerFilterConfig(include_types=("Linear",)))
    assert (head.name, head.aliases) == ("body.3", ("head", "tail"))
    assert names(model, exclude_names=("tail",), include_types=("Linear",)) == []
    model.head._modules["up"] = model
    assert "head" in {place.name for place in name_modules(model)}


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({}, range(40)),
        ({"every_n_steps": 10}, [0, 10, 20, 30]),
        ({"every_n_steps": 10, "start_step": 5}, [5, 15, 25, 35]),
        ({"every_n_steps": 10, "start_step": 5, "stop_step": 25}, [5, 15, 25]),
        ({"every_n_steps": None}, []),
        ({"every_n_steps": None, "explicit_steps": (3, 7)}, [3, 7]),
        ({"every_n_steps": 20, "explicit_steps": [1, 2], "start_step": 10}, [1, 2, 10, 30]),
        ({"stop_step": 2, "explicit_steps": (30,)}, [0, 1, 2, 30]),
    ],
)
def test_schedules(options, due):
    schedule = HookScheduleConfig(**options)
    assert [step for step in range(40) if schedule.is_due(step)] == list(due)
    assert schedule.never_fires is (not due)
    assert hash(schedule) == hash(HookScheduleConfig(**options))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every_n_steps", 0),
        ("every_n_steps", -1),
        ("every_n_steps", 2.5),
        ("every_n_steps", True),
        ("start_step", None),
        ("start_step", -1),
        ("stop_step", "5"),
        ("explicit_steps", 5),
        ("explicit_steps", "55"),
        ("explicit_steps", (1, -1)),
        ("explicit_steps", (None,)),
    ],
)
def test_bad_schedules_name_their_field(field, value):
    with pytest.raises(SchemaValidationError, match=f"^{field}"):
        HookScheduleConfig(**{field: value})
    with pytest.raises(SchemaValidationError, match=r"^stop_step"):
        HookScheduleConfig(start_step=5, stop_step=4)
