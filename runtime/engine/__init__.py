"""Engines that run offloaded forwards, their policies and caches, speculation, and the hooks into a model."""
