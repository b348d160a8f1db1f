"""Names by which an offload is found, and by which its workers are asked."""

OFFLOAD = "expertcast"
"""Among what vLLM hands to a model's operators."""
STATISTICS = "expertcast_statistics"
"""Method of workers: counters as plain values. `llm.collective_rpc(STATISTICS)` gives each worker's."""
METRICS = "expertcast_metrics"
"""Method of workers: the same as a page for Prometheus."""
