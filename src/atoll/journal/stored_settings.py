"""The settings of a cluster as a journal or an event log has them."""

from __future__ import annotations

from atoll._version import __version__
from atoll.cluster.settings import DECISIONS, ClusterSettings
from atoll.errors import IncompatibleJournalError


class StoredSettings(ClusterSettings, frozen=True):
    """The settings of the cluster whose events are stored."""

    decisions: int = 0  # of a version that did not store them

    def current(self) -> ClusterSettings:
        """Return the settings. Raise IncompatibleJournalError if the version that stored them decides differently."""
        if self.decisions != DECISIONS:
            raise IncompatibleJournalError(
                f"another version of atoll made the decisions {self.decisions} of this journal, and atoll "
                f"{__version__} can repeat only the decisions {DECISIONS}: continue with that version"
            )
        return ClusterSettings(**{name: getattr(self, name) for name in self.__struct_fields__})
