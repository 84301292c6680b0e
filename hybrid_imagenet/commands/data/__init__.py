"""Prepares and checks datasets."""
