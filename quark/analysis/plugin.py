"""Joins runs to the analysis: alerts, health scores, phases, comparison, explanation."""
