"""Predictor checkpoints: file format, hub transfer, and the bundled reference model."""
