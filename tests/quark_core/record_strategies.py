"""Records of every kind, made by hypothesis out of the annotations of their types."""

from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

from golden import ORIGIN
from hypothesis import strategies as st

from quark_core.records import RECORD_TYPES, Record
from quark_core.records.json_object import JsonObject, normalize_object

INDEXES = st.integers(0, 2**63 - 1) | st.integers(0, 300)
TEXTS = st.text(max_size=8)
JSON = st.dictionaries(
    TEXTS, st.none() | st.integers() | st.floats() | TEXTS | st.lists(st.booleans()), max_size=3
).map(lambda values: normalize_object(values, "payload"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
# Floats inside of JSON are finite; as a column of their own they may be anything.
PLAIN = {int: INDEXES, float: st.floats(), str: TEXTS, bool: st.booleans(), JsonObject: JSON}


def values_of(annotation, floats=None, *, inside=False):
    """Values of a field; `floats` are those that a field of its own may have."""
    if get_origin(annotation) in (Union, UnionType):
        return st.one_of(
            [values_of(option, floats, inside=inside) for option in get_args(annotation)]
        )
    if annotation is type(None):
        return st.none()
    if get_origin(annotation) is tuple:
        items = values_of(get_args(annotation)[0], inside=True)
        return st.lists(items, max_size=3).map(tuple)
    if isinstance(annotation, type) and issubclass(annotation, Record):
        hints = get_type_hints(annotation)
        fields = {name: hints[name] for name in annotation.__struct_fields__}
        return st.builds(
            annotation, **{name: values_of(hint, inside=True) for name, hint in fields.items()}
        )
    if annotation is float:
        return FINITE if inside else PLAIN[float] if floats is None else floats
    return PLAIN[annotation]


def records_of(kind, floats=None):
    record_type = RECORD_TYPES[kind]
    hints = get_type_hints(record_type)
    given = {name: st.just(value) for name, value in ORIGIN.items()}
    given |= {"sequence": INDEXES, "time_us": st.integers(-(2**56), 2**56)}
    fields = {
        name: given.get(name) if name in given else values_of(hints[name], floats)
        for name in record_type.__struct_fields__
    }
    return st.builds(record_type, **fields)


BATCHES = {kind: records_of(kind) for kind in RECORD_TYPES}
ANY_BATCH = st.sampled_from(sorted(BATCHES)).flatmap(
    lambda kind: st.lists(BATCHES[kind], min_size=1, max_size=12)
)
