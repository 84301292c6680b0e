"""Benchmarks of the parts; nothing imports them."""
