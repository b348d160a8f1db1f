"""Time per token of offloaded decoding: shapes, routing processes, runs, and the peer."""
