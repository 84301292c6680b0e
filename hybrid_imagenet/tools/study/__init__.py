"""Comparisons of methods, with several seeds, beside the papers' own numbers: `hybrid-imagenet study`."""
