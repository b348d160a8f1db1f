"""Fitting, scoring and reporting predictors."""
