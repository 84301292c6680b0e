"""`hybrid-imagenet doctor [-H hosts]`: finds typical problems of clusters before a run."""
