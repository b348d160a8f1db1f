"""What is seen of a run: counters, spans, timelines, layer times."""
