"""Observation of runs: statistics, spans, timelines and layer times."""
