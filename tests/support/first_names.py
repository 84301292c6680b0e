"""Uses the first names of the library as a user's program does.

The environment of TensorFlow has not been set yet at this time.
"""

import hybrid_imagenet as hi

NAMES = (hi.init, hi.rank, hi.size, hi.local_rank)
