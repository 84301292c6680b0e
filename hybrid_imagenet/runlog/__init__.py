"""Keeps a run's directory, records, view, summary and standard logs."""
