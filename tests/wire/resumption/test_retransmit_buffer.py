"""The retransmit buffer of a connection, compared with a list of all that was sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameError
from atoll.wire.resumption.retransmit_buffer import Counts, RetransmitBuffer

LIMIT = 1000
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("whole"), st.binary(max_size=9)),
        st.tuples(st.just("pieced"), st.binary(max_size=9)),
        st.tuples(st.just("acknowledge"), st.tuples(st.floats(0, 1), st.floats(0, 1))),
    ),
    max_size=40,
)


@given(STEPS)
def test_what_is_not_acknowledged_is_kept_in_order_and_nothing_else(steps):
    buffer = RetransmitBuffer(LIMIT)
    sent: dict[str, list[bytes]] = {"whole": [], "pieced": []}
    done = [0, 0]
    for kind, value in steps:
        if kind == "acknowledge":
            kinds = zip(done, sent.values(), value, strict=True)
            done = [have + int(part * (len(frames) - have)) for have, frames, part in kinds]
            buffer.acknowledge(Counts(*done))
        elif kind == "whole":
            buffer.retain(value)
            sent[kind].append(value)
        else:
            buffer.retain_pieced(value)
            sent[kind].append(value)
        left = [(frame, False) for frame in sent["whole"][done[0] :]]
        left += [(frame, True) for frame in sent["pieced"][done[1] :]]
        assert list(buffer.unacknowledged()) == left
        assert buffer.nbytes == sum(len(frame) for frame, _ in left)
        assert buffer.sent == (len(sent["whole"]), len(sent["pieced"]))
    other = RetransmitBuffer(LIMIT)
    other.restore(buffer.acknowledged, buffer.whole, buffer.pieced)
    assert other == buffer
    buffer.clear()
    assert buffer == RetransmitBuffer(LIMIT, buffer.acknowledged)


@pytest.mark.parametrize("counts", [Counts(3, 0), Counts(2, 2), Counts(0, 1), Counts(1, 0)])
def test_a_peer_that_says_it_has_more_than_was_sent_or_less_than_it_had_is_refused(counts):
    buffer = RetransmitBuffer(LIMIT)
    for _ in range(2):
        buffer.retain(b"a message")
    buffer.retain_pieced(b"a large one")
    buffer.acknowledge(Counts(1, 1))
    with pytest.raises(FrameError, match="but 2 \\+ 1 were sent and it acknowledged 1 \\+ 1 before"):
        buffer.acknowledge(counts)


def test_only_more_acknowledgments_than_messages_mean_that_the_state_is_older_than_the_peers() -> None:
    buffer = RetransmitBuffer(LIMIT)
    buffer.retain(b"frame")
    buffer.acknowledge(Counts(1, 0))
    with pytest.raises(FrameError, match=r"the state here is older than the peer's, .* older backup"):
        buffer.acknowledge(Counts(2, 0))
    with pytest.raises(FrameError, match=r"before$"):
        buffer.acknowledge(Counts(0, 0))
