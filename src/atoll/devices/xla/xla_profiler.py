"""XLA's profiler in this process."""

from __future__ import annotations

from collections.abc import Callable

from jax._src.lib import _profiler

from atoll.protocol.profiles import Recording


def begin_profile(recording: Recording) -> Callable[[], bytes]:
    """Begins to record; what it returns ends that. See `devices.device.DeviceBackend`.

    No Python is traced: it would be this worker's, and cost every session that is served here.
    """
    options = _profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = recording.host_tracer_level
    if recording.advanced:
        options.advanced_configuration = dict(recording.advanced)
    session = _profiler.ProfilerSession(options)
    return lambda: bytes(session.stop())
