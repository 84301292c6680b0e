"""Prepares and checks data sets."""
