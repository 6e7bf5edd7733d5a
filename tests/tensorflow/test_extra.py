"""Without the extra."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_tensorflow_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("atoll.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install 'atoll\[tensorflow\]'"):
        importlib.import_module("atoll.tensorflow")
