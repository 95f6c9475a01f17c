"""What a helper sends is unpickled: it names types, and no functions."""

import pickle

import numpy as np
import pytest

from quark_core.hosting.protocol import dump_value, load_value
from quark_core.records import RECORD_TYPES
from quark_core.records.columns import Columns
from quark_core.testing.fakes import make_samples


def name_global(module, name):
    """A pickle that asks for something by its name."""
    return (
        b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)])
    ) + (name.encode() + b"\x93.")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        # Through what a module has imported, to any function there is.
        ("quark_core.hosting.protocol", "io.open"),
        ("quark_core.system.process", "os.system"),
        ("pathlib", "os.system"),
        ("collections", "_sys.exit"),
        ("numpy", "ctypeslib.load_library"),
        ("quark_core.hosting.protocol", "pickle.Unpickler.load"),
        # What a module has imported itself, and functions of its own.
        ("quark_core.hosting.protocol", "io"),
        ("quark_core.hosting.protocol", "load_value"),
        ("quark_core.hosting.child_process", "Popen"),
        ("numpy", "load"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
    ],
)
def test_only_types_of_a_module_itself_are_named(module, name):
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        load_value(name_global(module, name))


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_records_and_columns_come_through(kind):
    records = make_samples(kind, "r")
    assert load_value(dump_value(records)) == records
    columns = Columns.from_records(kind, records)
    assert load_value(dump_value(columns)).to_records() == tuple(records)


def test_arrays_come_through():
    for array in (
        np.arange(5),
        np.array([[1.5, 2]], order="F"),
        np.array(["a", None], dtype=object),
        np.datetime64("2026-01-01"),
        np.float32(0.5),
    ):
        found = load_value(dump_value(array))
        assert np.array_equal(found, array)
        assert found.dtype == array.dtype
