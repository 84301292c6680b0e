"""Predicts step time, efficiency and training time on clusters: `hybrid-imagenet plan --help`."""
