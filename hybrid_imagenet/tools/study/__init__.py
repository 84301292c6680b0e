"""Compares methods over several seeds, beside the papers' own numbers: `hybrid-imagenet study`."""
