"""Uses the names with which a program of the user's own begins, before TensorFlow's environment is
set.
"""

import hybrid_imagenet as hi

NAMES = (hi.init, hi.rank, hi.size, hi.local_rank)
