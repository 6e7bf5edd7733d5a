"""What a snapshot has comes back as it was, and Python handles it as quickly."""

from __future__ import annotations

import gc
import pickle
import sys
from collections import deque
from types import SimpleNamespace

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.errors import Code
from atoll.journal import snapshots
from atoll.journal.files import Directory
from atoll.journal.snapshots import pickled, unpickled


class Made:
    """Of the module of tests; `_has_only_attributes` is asked about those of Atoll."""

    def __init__(self) -> None:
        self.one, self.itself = 1, self


def test_what_is_unpickled_has_no_dictionary_of_its_own(monkeypatch):
    """With one, Python 3.11 reads its attributes more slowly."""
    monkeypatch.setattr(Made, "__module__", "atoll.made")
    monkeypatch.setitem(sys.modules, "atoll.made", SimpleNamespace(Made=Made))
    snapshots._has_only_attributes.cache_clear()
    found = unpickled(pickled([Made()]))[0]
    assert (found.one, found.itself) == (1, found)
    if sys.version_info < (3, 13):  # where an object refers to its attributes, or to a dictionary that has them
        assert not any(type(each) is dict for each in gc.get_referents(found))
        assert any(type(each) is dict for each in gc.get_referents(pickle.loads(pickle.dumps(found))))


@pytest.mark.parametrize(
    "value",
    [OSError(2, "no"), Code.INTERNAL, ClusterSettings("1x1x2"), Directory, len, {1: (2.5, b"x")}, deque([1]), None],
)
def test_what_is_made_in_another_way_is_what_it_was(value):
    found = unpickled(pickled(value))
    assert (type(found), str(found)) == (type(value), str(value))
