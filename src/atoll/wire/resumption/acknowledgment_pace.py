"""How often the two ends of a resumable connection say something about it."""

from __future__ import annotations

# What has come is acknowledged after so many messages, or bytes; and once a second, whatever it is. An acknowledgement
# wakes its peer, which costs more than what is kept until then.
ACKNOWLEDGE_MESSAGES = 1024
ACKNOWLEDGE_BYTES = 1 << 20
# Who was dialed is heard once a second: where it is not for so many, another socket may reach it.
SILENT_SECONDS = 5
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.02, 0.5  # between two attempts to dial again
