"""`hybrid-imagenet doctor [-H hosts]`: what goes wrong on clusters, looked for before a run."""
