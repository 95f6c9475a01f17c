"""Optuna's journal over a log of entries: what is passed over, what is asked, what counts once."""
