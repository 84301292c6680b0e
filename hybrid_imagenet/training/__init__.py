"""Builds the parts of a run and trains: trainer, loop, step, and what the records hold."""
