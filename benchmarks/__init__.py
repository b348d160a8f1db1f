"""Benchmarks and studies of expertcast with their results; not part of the package."""
