"""Stores and shows a run: its directory, records, summary, view and TensorBoard events."""
