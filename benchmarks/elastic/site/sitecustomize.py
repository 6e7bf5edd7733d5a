"""On the path of the workers and compilers of benchmarks: they know the computation that sleeps."""

import sys

if any(argument.startswith(("atoll.worker", "atoll.devices.compilers")) for argument in sys.orig_argv):
    from benchmarks.elastic import sleeping

    sleeping.register()
