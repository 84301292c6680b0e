"""Decompresses concatenated xz streams on all cores: python3 parallel_xz.py SIZES < file > tar.

xz before 5.4 decompresses on one core, and later ones need the option -T0. This needs only the
standard library of Python 3, because it runs before the environment has been unpacked. SIZES is a
file with the compressed size of each stream in bytes, one per line.
"""

import collections
import concurrent.futures
import lzma
import os
import sys


def main():
    """Writes the streams in their order; reads ahead by two streams per core."""
    with open(sys.argv[1]) as file:
        sizes = [int(line) for line in file]
    cores = len(os.sched_getaffinity(0))
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for size in sizes:
            # lzma lets other threads run while it decompresses.
            waiting.append(pool.submit(lzma.decompress, sys.stdin.buffer.read(size)))
            if len(waiting) > 2 * cores:
                sys.stdout.buffer.write(waiting.popleft().result())
        for stream in waiting:
            sys.stdout.buffer.write(stream.result())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
