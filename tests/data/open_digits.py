"""Opens the digits in a directory and prints how many images it holds: `open_digits.py DIRECTORY`."""

import sys

from hybrid_imagenet import data

print(data.open_source("digits", sys.argv[1]).num_examples)
