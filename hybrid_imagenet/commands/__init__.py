"""The commands other than training."""
