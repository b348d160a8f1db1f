"""Stores that hold experts in host memory or on disk, and the code that fills them from a checkpoint."""
