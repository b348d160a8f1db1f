"""Offloaded and speculative execution of `transformers` MoE models."""

from expertcast import UNSUPPORTED

if UNSUPPORTED:
    raise ImportError(UNSUPPORTED)
