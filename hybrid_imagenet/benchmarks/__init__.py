"""Measures a user's machine: the benchmarks of `hybrid-imagenet bench NAME`."""
