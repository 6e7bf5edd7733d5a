"""The main program of a session's Python process. It isolates itself before it starts threads and imports JAX."""

from __future__ import annotations

import os
import sys

from atoll.cluster.processes.priorities import lower_priority
from atoll.cluster.processes.process_runtime import read_options, starting
from atoll.cluster.sandbox.file_system import GrantError
from atoll.cluster.sandbox.grants import View
from atoll.cluster.sandbox.isolation import isolate
from atoll.cluster.sandbox.mechanisms import Namespaces
from atoll.protocol.messages.python_messages import PythonOptions

# Give priority to the computations of all tenants, which may run on the same CPUs.
_NICENESS = 10


def main() -> None:
    options = read_options(PythonOptions)
    if options.sandbox.view is View.GRANTED:
        lower_priority(_NICENESS)
    try:
        sandbox = isolate(options.sandbox, options.mechanisms, (options.descriptor,))
    except (OSError, GrantError) as error:
        sys.exit(f"its sandbox cannot be created: {error}")
    # Python's output is for the user. Discard the output of libraries, such as gloo, which write to the descriptor.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with starting():
        from atoll.host_services.python.program.python_runner import run

    run(options, sandbox.namespaces is not Namespaces.NONE)


if __name__ == "__main__":
    main()
