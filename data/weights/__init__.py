"""A checkpoint's weights: its files, and tensors by the names and in the floats that a model has, read when they are needed."""
