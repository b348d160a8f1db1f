"""A model served: its numbers for Prometheus, and slots that are full before the first request."""
