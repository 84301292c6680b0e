"""Compares methods over several seeds and with the papers' numbers: `python -m studies`."""
