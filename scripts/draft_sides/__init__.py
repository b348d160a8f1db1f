"""The parts of `scripts/bench_drafts.py`: models, sides, what is watched of a run, and what is said of the figures."""
