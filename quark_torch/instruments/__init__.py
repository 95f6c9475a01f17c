"""Instruments of `quark.watch(extras=…)`: what looks at some modules in probed steps."""
