"""All-reduce algorithms played message by message: each round takes the latency plus the bytes over
the bandwidth.

Independent of the closed formulas: the rounds follow from what the algorithms do.
"""


def message(size, latency, per_byte):
    return latency + size * per_byte


def ring(size, ranks, latency, per_byte):
    """Each rank passes one p-th of the data on; p - 1 rounds to sum, p - 1 to spread the sums."""
    time = 0.0
    for _phase in ("reduce-scatter", "all-gather"):
        for _round in range(ranks - 1):
            time += message(size / ranks, latency, per_byte)
    return time


def masters(size, groups, group_size, inside, between):
    """Reduce along a chain of the group's members, ring over the masters, broadcast along the
    chain.

    The chain is pipelined: every hop adds its latency, and the data passes each link once.
    """
    time = 0.0
    for _phase in ("reduce", "broadcast"):
        for _member in range(group_size - 1):
            time += inside[0]
        if group_size > 1:
            time += size * inside[1]
    return time + ring(size, groups, *between)


def torus(size, vertical, horizontal, row, column):
    time = 0.0
    for _round in range(horizontal - 1):  # reduce-scatter along the row
        time += message(size / horizontal, *row)
    time += ring(size / horizontal, vertical, *column)
    for _round in range(horizontal - 1):  # all-gather along the row
        time += message(size / horizontal, *row)
    return time
