"""From text to traces: running a model over documents, keeping what its routers saw, and reading it back."""
