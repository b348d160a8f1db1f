"""The OpenAI-compatible server of `expertcast serve`."""
