"""Trains from a configuration: components of a run, loop, step, validation and records."""
