"""Quark in other people's training loops: Lightning, Transformers, Accelerate.

Each is a module that imports its framework, so import the one you use:

    from quark_torch.integrations.lightning import QuarkLogger
    from quark_torch.integrations.hugging_face import QuarkCallback
    from quark_torch.integrations.accelerate import QuarkTracker
"""
