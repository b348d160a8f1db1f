"""Simulation of the CUDA path: the real code over streams, events and copy engines in virtual time."""
