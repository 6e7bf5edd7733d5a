"""The largest frames that a controller accepts from clients, whose messages are decoded before they are checked."""

from __future__ import annotations

from typing import get_args

from atoll.protocol import messages as m
from atoll.wire.framing import MAX_FIRST_FRAME, MAX_FRAME, FrameLimits

# Bytes of a frame that contains nodes of programs, which name devices.
MAX_NODES_FRAME = 768 * 1024
MAX_NODES_FRAME_PER_DEVICE = 16 * 1024
# Bytes of any other frame.
MAX_CLIENT_FRAME = 2 << 20


def _tag_of(kind: type[m.Message]) -> int:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int)
    return tag


_NO_MESSAGES_OF_CLIENTS = {
    _tag_of(kind): MAX_FIRST_FRAME
    for kind in get_args(m.ToController)
    if kind not in get_args(m.FromProxy | m.FromOperator)
}


def limits_of_client(device_count: int) -> FrameLimits:
    """Return the limits of the frames of a client of a cluster with `device_count` devices."""
    nbytes = MAX_NODES_FRAME + MAX_NODES_FRAME_PER_DEVICE * device_count
    by_tag = dict.fromkeys(map(_tag_of, (m.ProgramPart, m.RegisterProgram)), min(nbytes, MAX_FRAME))
    by_tag[_tag_of(m.CallsRecorded)] = m.MAX_CALL_BYTES + MAX_FIRST_FRAME
    return FrameLimits(_NO_MESSAGES_OF_CLIENTS | by_tag, MAX_CLIENT_FRAME)
