"""Advice on the runtime's settings, from short measured runs and simulations of the runtime."""
