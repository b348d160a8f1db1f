"""Planning of memory for partially loaded experts: states, pools, costs and the order of reads.

These modules decide only; they read, decode and hold no weights. Source: ZipMoE, section 3.
"""
