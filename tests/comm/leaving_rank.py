"""A program of one's own that ends as Python programs do, after sums over sets of ranks."""

from hybrid_imagenet import comm

if __name__ == "__main__":
    comm.start(comm.Settings(allreduce="torus", options={"torus_grid": "1x2"})).barrier()
