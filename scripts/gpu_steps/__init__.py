"""The steps of `scripts/gpu_day.py`: a file per step, and what they share."""
