"""Predictor checkpoints: their file format, where they come from, and the bundled reference model."""
