"""Benchmarks that need a checkout: comparisons with other implementations, and costs of parts."""
