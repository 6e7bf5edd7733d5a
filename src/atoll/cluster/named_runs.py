"""Named runs: the name under which a script runs, so that another script can continue where it ended."""

from __future__ import annotations

import msgspec

from atoll.cluster.array_names import check_array_name
from atoll.errors import invalid

MAX_DETACHED_SECONDS = 24 * 3600.0
MAX_ATTACH_SECONDS = 24 * 3600.0
DEFAULT_DETACHED_SECONDS = 600.0  # of `atoll.connect(detach=True)`
DEFAULT_ATTACH_SECONDS = 60.0


class NamedRun(msgspec.Struct, frozen=True):
    """The run of a script. At most one session of a tenant has the name; "" stands for a run without a name.

    Attributes:
      name: at most 128 letters, digits, `_`, `-` and `.`.
      detach: seconds for which the submitted work continues if the script ends. If 0, the work ends with the script.
      wait: seconds for which a new session waits for the end of the former session of the name.
    """

    name: str = ""
    detach: float = 0.0
    wait: float = DEFAULT_ATTACH_SECONDS

    def check(self) -> None:
        """Raise INVALID_ARGUMENT if an attribute is invalid."""
        if not self.name:
            if self.detach:
                raise invalid("a run without a name cannot be detached: give it a name")
            return
        check_array_name(self.name)
        if not 0 <= self.detach <= MAX_DETACHED_SECONDS:
            raise invalid(f"a run is detached for 0 to {MAX_DETACHED_SECONDS:.0f} s, not {self.detach}")
        if not 0 <= self.wait <= MAX_ATTACH_SECONDS:
            raise invalid(f"a run waits for 0 to {MAX_ATTACH_SECONDS:.0f} s to be attached, not {self.wait}")


UNNAMED = NamedRun()
