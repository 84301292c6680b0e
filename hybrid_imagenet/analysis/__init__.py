"""Criteria of the papers, and the numbers that they published; without TensorFlow."""
