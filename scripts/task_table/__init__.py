"""The parts of `scripts/bench_tasks.py`: its rows."""
