"""Experts in several states of readiness: what is kept how, what that takes, and in which order the rest is read.

After ZipMoE (rows E4 to E19). Nothing here reads, decodes or holds a weight: others do, and ask here what and when.
"""
