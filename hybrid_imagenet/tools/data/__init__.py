"""Prepares, checks and shows data sets."""
