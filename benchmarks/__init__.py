"""Measurements and studies of the toolkit, with what they found; no part of the package."""
