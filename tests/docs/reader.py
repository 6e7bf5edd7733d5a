"""The environment of a reader of the documentation, without settings of Atoll and JAX."""

from __future__ import annotations

import os

# The tests' guardian finds the processes of a killed run by this variable.
_RUN = "ATOLL_TEST_RUN"


def environment_of_reader() -> dict[str, str]:
    """Return the environment of this process without its settings of Atoll and JAX."""
    return {
        name: value for name, value in os.environ.items() if name == _RUN or not name.startswith(("ATOLL_", "JAX_"))
    }
