"""`python -m benchmarks`: Atoll beside its peers, in turn, in one run."""

from benchmarks.command import bench

if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")
