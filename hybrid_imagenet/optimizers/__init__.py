"""Keras optimizers that update all variables of a model together."""
