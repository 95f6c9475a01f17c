"""Settings of Hypothesis: no deadline, since a slow machine is no failure."""

from hypothesis import settings

settings.register_profile("quark", deadline=None)
settings.load_profile("quark")
