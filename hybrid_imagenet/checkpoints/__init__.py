"""Stores the state of a run, restores it, and reads trained networks."""
