"""Names of the files in a predictor checkpoint, and the version of their format."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
METRICS = "metrics.json"
DOCUMENTS = "documents.json"
CARD = "README.md"

ALL = (CONFIG, WEIGHTS, METRICS, DOCUMENTS, CARD)

FORMAT = 1
"""Raised when a reader of the old form could misread the new one."""

TAP_POINT = "input of the norm before the router (residual stream after attention)"
"""Where residual_TD is taken; config.json has it, and what is read besides, so that a checkpoint says what it reads."""
