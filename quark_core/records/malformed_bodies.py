"""What can be read of a body that somebody has malformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records.codec import Column, DecodedBody
from quark_core.records.fields import column_types

if TYPE_CHECKING:
    from numpy.typing import NDArray

MALFORMED = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What decoding makes of bodies that somebody has malformed, beside `SchemaValidationError`."""


def mend_body(body: DecodedBody) -> tuple[DecodedBody, NDArray[Any]]:
    """A body without those JSON values that cannot be made, and which records had none of them."""
    import numpy as np

    sound = np.ones(body.count, dtype=np.bool_)
    columns = [body.column(name) for name in column_types(body.kind) if name in body]
    for place, column in enumerate(columns):
        if column.encoding != "j" or len(column.head) != body.count:
            continue
        texts = list(column.head)
        for row, text in enumerate(texts):
            one = DecodedBody(body.version, body.kind, 1, [Column(column.name, "j", [text])])
            try:
                one.to_list(column.name)
            except (SchemaValidationError, *MALFORMED):
                texts[row], sound[row] = None, False
        columns[place] = Column(column.name, "j", texts)
    return DecodedBody(body.version, body.kind, body.count, columns), sound
