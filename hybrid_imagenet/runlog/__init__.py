"""Stores and shows a run: directory, records, summary, view, TensorBoard, trackers."""
