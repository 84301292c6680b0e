"""Compares methods over several seeds, beside the papers' own numbers: `python -m studies`."""
