"""Residency, copies and decoding decided on the device. Never run on a GPU; no default and no "auto" selects it."""
