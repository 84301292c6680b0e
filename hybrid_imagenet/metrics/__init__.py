"""Metric sums over ranks, logs and the papers' criteria."""
