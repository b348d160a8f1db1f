"""The parts of `scripts/bench_disk.py`: its model, its sides, the cage of a run, and what is said of the figures."""
