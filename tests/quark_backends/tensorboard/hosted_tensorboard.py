"""The TensorBoard mirror in its helper process, as a function that any process can import."""

from dataclasses import replace

from quark_backends.tensorboard.plugin import quark_register_backends
from quark_core.hosting.hosted_backend import can_be_hosted, open_hosted

(_IN_PROCESS,) = quark_register_backends()


def open_in_helper(config):
    """Open the mirror as a lane does, in a process of its own."""
    assert can_be_hosted(_IN_PROCESS, config)
    return open_hosted(_IN_PROCESS, config)


DEFINITION = replace(_IN_PROCESS, open=open_in_helper)
