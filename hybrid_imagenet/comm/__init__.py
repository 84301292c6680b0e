"""Communication between ranks: the only part that imports Horovod."""
