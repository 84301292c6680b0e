"""All-reduce algorithms simulated message by message.

Each round takes the latency plus the bytes over the bandwidth. The rounds follow from the
algorithms, independently of the closed formulas.
"""


def message(size, latency, per_byte):
    return latency + size * per_byte


def ring(size, ranks, latency, per_byte):
    """Each rank sends one p-th of the data: p - 1 rounds to sum, p - 1 to spread the sums."""
    time = 0.0
    for _phase in ("reduce-scatter", "all-gather"):
        for _round in range(ranks - 1):
            time += message(size / ranks, latency, per_byte)
    return time


def masters(size, groups, group_size, inside, between):
    """Reduces along a chain of the group, sums over the masters' ring, broadcasts along the chain.

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
    # Reduce-scatter along the row.
    for _round in range(horizontal - 1):
        time += message(size / horizontal, *row)
    time += ring(size / horizontal, vertical, *column)
    # All-gather along the row.
    for _round in range(horizontal - 1):
        time += message(size / horizontal, *row)
    return time
