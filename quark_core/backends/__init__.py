"""The storage backends: their contract, their results, and how they are found."""

from quark_core import presentation
from quark_core.records.base import RECORD_TYPES


def _load_record_kinds() -> None:
    from quark_core.backends.registry import default_registry

    default_registry().load_record_kinds()


def _render_html(value: object) -> str | None:
    from quark_core.backends.registry import default_registry

    text: str | None = default_registry().ask("quark_render_html", value=value)
    return text


# Records and results do not know plugins. Whoever has one has imported this package.
RECORD_TYPES.load_more = _load_record_kinds
presentation.render_html = _render_html
