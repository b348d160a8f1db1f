"""A checkpoint's weights: its files, and tensors by the names that a model has, read when they are needed."""
