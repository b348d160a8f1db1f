"""The parts of `scripts/train_reference.py`: options, data, model, trainer, report."""
