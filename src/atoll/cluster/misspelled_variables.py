"""Environment variables whose names resemble those of Atoll: a misspelled setting would otherwise have no effect."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.environment_variables import ISLAND, TABLES
from atoll.cluster.former_names import FORMER_VARIABLES
from atoll.cluster.settings import SETTINGS

_PREFIX = "ATOLL_"
_MIN_SIMILARITY = 0.85  # of a misspelled name; users may have variables of their own with the prefix


def misspelled_variables(environment: Mapping[str, str]) -> list[str]:
    """Return one line for each variable that Atoll does not read and whose name is almost that of one that it reads.

    A shape in ATOLL_ISLAND, which takes a number, is meant for ATOLL_ISLANDS.
    """
    given = [name for name in environment if name.startswith(_PREFIX)]
    if not given:
        return []
    known = {each.variable for each in SETTINGS.values()} | {
        each.variable for table in TABLES for each in table.settings
    }
    known |= set(FORMER_VARIABLES.values())
    lines = []
    if not (environment.get(ISLAND.variable) or "0").strip().isdecimal():
        lines.append(
            f"the environment variable {ISLAND.variable} is the number of an island, for `atoll host`; did you mean "
            f"{SETTINGS['islands'].variable}?"
        )
    unknown = sorted(set(given) - known)
    if not unknown:
        return lines
    import difflib  # here, because each script and command calls this function when it starts

    for name in unknown:
        for meant in difflib.get_close_matches(name, sorted(known), 1, _MIN_SIMILARITY):
            lines.append(f"the environment variable {name} has no effect; did you mean {meant}?")
    return lines
