"""Whether prefetching pays: short runs, a model of the runtime, advice."""
