"""Expert offloading with forecasts for vLLM: a plug-in that vLLM finds by itself once this package is installed."""
