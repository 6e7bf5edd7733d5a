"""The environment of a reader of the pages: without settings of Atoll and JAX."""

from __future__ import annotations

import os

# By this, the guardian of the tests finds what is left of a run that was killed.
_RUN = "ATOLL_TEST_RUN"


def environment_of_reader() -> dict[str, str]:
    """Return the environment of this process without its settings of Atoll and JAX."""
    return {
        name: value for name, value in os.environ.items() if name == _RUN or not name.startswith(("ATOLL_", "JAX_"))
    }
