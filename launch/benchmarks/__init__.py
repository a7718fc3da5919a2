"""Benchmarks by suite; `python -m launch.bench --help` runs them."""
