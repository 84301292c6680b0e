"""Predicts training times on clusters: `hybrid-imagenet plan`. Training does not import it."""
