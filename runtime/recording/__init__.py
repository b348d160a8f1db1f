"""Observation of runs: statistics and spans."""
