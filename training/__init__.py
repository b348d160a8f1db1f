"""Fit, evaluate and report predictors."""
