"""Benchmarks for a user's machine, run by `hybrid-imagenet bench NAME`."""
