"""Builds the parts of a run and trains: session, loop, step, callbacks."""
