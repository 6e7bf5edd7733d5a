"""Tests of removing other sessions' programs from the data of XLA's profiler."""

from __future__ import annotations

import pytest
from jax.profiler import ProfileData

from atoll.errors import StatusError
from atoll.host_services.profiles.xspace import HIDDEN, Others, hide

# jaxlib aborts if its own warning on Python 3.12 is turned into an error.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")

RECORDED = """
planes {
  name: "/host:CPU"
  lines {
    id: 1 name: "worker thread"
    events { metadata_id: 1 offset_ps: 10 duration_ps: 5000 stats { metadata_id: 7 ref_value: 8 } }
    events { metadata_id: 2 offset_ps: 20 duration_ps: 6000 stats { metadata_id: 7 ref_value: 9 } }
    events { metadata_id: 3 offset_ps: 30 duration_ps: 7000 stats { metadata_id: 10 double_value: 0.5 } }
  }
  event_metadata { key: 1 value { id: 1 name: "dot.4" } }
  event_metadata { key: 2 value { id: 2 name: "run of jit_secret(17)" display_name: "jit_secret"
                                  stats { metadata_id: 11 bytes_value: "all of jit_secret" } metadata: "jit_secret" } }
  event_metadata { key: 3 value { id: 3 name: "jit_secret_of_mine" stats { metadata_id: 11 bytes_value: "mine alone" }}}
  stat_metadata { key: 7 value { id: 7 name: "hlo_module" } }
  stat_metadata { key: 8 value { id: 8 name: "jit_secret" description: "of jit_secret" } }
  stat_metadata { key: 9 value { id: 9 name: "jit_own" } }
  stat_metadata { key: 10 value { id: 10 name: "share" } }
  stat_metadata { key: 11 value { id: 11 name: "Hlo Proto" } }
}
hostnames: "machine"
"""


def serialized(text: str = RECORDED) -> bytes:
    return bytes(ProfileData.text_proto_to_serialized_xspace(text))


def test_names_and_contents_of_others_programs_are_hidden() -> None:
    hidden = hide(serialized(), Others({"jit_secret", "jit_other"}))
    assert hidden.replace(b"jit_secret_of_mine", b"").count(b"jit_secret") == 0
    assert b"mine alone" in hidden
    (plane,) = ProfileData.from_serialized_xspace(hidden).planes
    (line,) = plane.lines
    events = [(event.name, event.duration_ns, dict(event.stats)) for event in line.events]
    name = HIDDEN.decode()
    assert events == [
        ("dot.4", 5, {"hlo_module": name}),
        (name, 6, {"hlo_module": "jit_own"}),
        ("jit_secret_of_mine", 7, {"share": 0.5}),
    ]


def test_of_two_programs_of_one_name_the_name_alone_is_shown() -> None:
    shown = hide(serialized(), Others(ambiguous={"jit_secret"}))
    assert b"all of jit_secret" not in shown
    assert b"mine alone" in shown
    (plane,) = ProfileData.from_serialized_xspace(shown).planes
    (line,) = plane.lines
    assert [event.name for event in line.events] == ["dot.4", "run of jit_secret(17)", "jit_secret_of_mine"]


def test_what_has_nothing_of_others_stays_as_it_is() -> None:
    whole = serialized()
    assert hide(whole, Others()) == whole
    assert hide(whole, Others({"jit_unknown"}, {"jit_other"})) == whole


@pytest.mark.parametrize("length", range(1, 120, 7))
def test_what_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(StatusError, match="invalid XSpace"):
        hide(serialized()[:-length], Others({"jit_secret"}))
