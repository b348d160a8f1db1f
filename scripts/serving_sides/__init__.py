"""What `bench_serving.py` is made of: servers to compare, clients that ask them, figures, and the tables."""
