"""Pure mathematics of the papers: NumPy and the standard library only."""
