"""What forecasts and runs are scored by, each a torchmetrics Metric: for training, evaluation and quality alike."""
