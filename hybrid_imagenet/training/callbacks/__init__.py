"""Connects the parts of a run to Keras: thin callbacks around them."""
