"""What a storage backend is: the contract, what it returns, and how backends are found."""

from quark_core.records.base import RECORD_TYPES


def _load_record_kinds() -> None:
    from quark_core.backends.registry import default_registry

    default_registry().load_record_kinds()


# Records do not know plugins. Whoever reads or writes batches has imported this package.
RECORD_TYPES.load_more = _load_record_kinds
