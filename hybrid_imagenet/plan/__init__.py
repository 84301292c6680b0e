"""Predicts step time, efficiency and training time on clusters: `python -m hybrid_imagenet.plan --help`."""
