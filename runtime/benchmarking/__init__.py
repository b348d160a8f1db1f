"""Benchmarks of offloaded decoding, models of published shapes, and synthetic routing."""
