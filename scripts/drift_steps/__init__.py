"""What `scripts/bench_drift.py` is made of."""
