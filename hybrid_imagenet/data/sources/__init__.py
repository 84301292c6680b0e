"""Reads images from storage: one module per form in which people keep them."""
