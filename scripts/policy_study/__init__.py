"""The parts of `scripts/benchmark_policies.py`: stages, quality, claims, page and figures."""
