"""Experts in host memory or on disk, and how they get there from a checkpoint."""
