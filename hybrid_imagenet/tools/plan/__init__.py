"""Implements `hybrid-imagenet plan`, which predicts training times on clusters."""
