"""A store of a third party does from a helper process what it does in the training process.

The embedded store stands for it: it can do everything that a primary can.
"""

from dataclasses import replace

import pytest
import test_embedded

from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backends.contract import Capability
from quark_core.hosting.hosted_backend import open_hosted
from quark_core.testing.conformance import OnceConformance
from quark_core.testing.process_conformance import ProcessConformance
from quark_core.testing.reading_conformance import (
    ArtifactConformance,
    FollowingConformance,
    ReadingConformance,
)
from quark_core.testing.store_conformance import PrimaryConformance, StoreConformance

THEIRS = replace(quark_register_backends()[0], name="theirs", own_process=True)


def open_theirs(config):
    return open_hosted(THEIRS, config)


@pytest.mark.long
class TestHosted(
    OnceConformance,
    ReadingConformance,
    ProcessConformance,
    PrimaryConformance,
    StoreConformance,
    FollowingConformance,
    ArtifactConformance,
):
    @pytest.fixture
    def definition(self):
        # Removal is for commands, which open a store in their own process.
        capabilities = THEIRS.capabilities - {Capability.REMOVAL}
        return replace(THEIRS, open=open_theirs, capabilities=capabilities)

    config = test_embedded.TestEmbedded.config
    observe = test_embedded.TestEmbedded.observe
