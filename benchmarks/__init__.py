"""Benchmarks: run on a GPU, results under benchmarks/results."""
