"""Opens the digits in a directory and prints how many images it holds: `open_digits.py DIRECTORY`."""

import sys
from pathlib import Path

from hybrid_imagenet.data.sources import digits

print(digits.open_digits(Path(sys.argv[1]), "train").num_examples)
