"""Comparisons of methods, with several seeds, beside the papers' own numbers: `python -m hybrid_imagenet.study`."""
