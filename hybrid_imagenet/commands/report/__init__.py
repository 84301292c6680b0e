"""Implements `hybrid-imagenet report`, which reports on runs, finished or not."""
