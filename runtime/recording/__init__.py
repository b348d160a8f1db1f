"""Observation of runs: statistics, spans and layer times."""
