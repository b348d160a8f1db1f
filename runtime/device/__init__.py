"""Copies decided and made on the device: tables, kernels, and a decode step as one CUDA graph."""
