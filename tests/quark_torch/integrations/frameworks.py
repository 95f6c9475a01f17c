"""The frameworks, each of which may be missing."""

import importlib
import warnings

import pytest


def import_or_skip(*names):
    """The modules of a framework, or a skip; what they warn of at import is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            pytest.importorskip(name.split(".")[0], exc_type=ImportError)
        return [importlib.import_module(name) for name in names]
