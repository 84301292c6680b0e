"""Keras callbacks: thin adapters over the pure parts."""
