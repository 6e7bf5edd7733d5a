"""On the path of the benchmark's workers: they know the computation that sleeps."""

import sys

if any("atoll.worker" in argument for argument in sys.orig_argv):
    from benchmarks.elastic import sleeping

    sleeping.register()
