"""Reads a set at a URL, and prints the sum of its labels."""

import sys

from hybrid_imagenet import data

source = data.open_source(sys.argv[3], sys.argv[1], cache_dir=sys.argv[2], storage_timeout=10.0)
print(source.read(range(source.num_examples))[1].sum())
