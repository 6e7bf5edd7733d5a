"""Options of Atoll's own that the plug-in adds to XLA's compile options, and that a proxy takes out again.

They travel among `env_option_overrides`, where jaxlib's client sends on any name with its value.
"""

from __future__ import annotations

# The program, as a portable artifact in base64, in place of the one in the request.
PROGRAM_OPTION = "atoll_program"
# The numbers of the client's callables that the program calls, as "FIRST+COUNT", in the order of the program's indices.
CALLBACKS_OPTION = "atoll_callbacks"
# On TPUs, the channels of each of these callables: a list of `HostChannels`, in JSON.
CHANNELS_OPTION = "atoll_callback_channels"
# The numbers of those that are called while it is compiled, as "FIRST:KEY,KEY,...": what stands for each in it, in
# hexadecimal.
COMPILE_CALLS_OPTION = "atoll_compile_calls"
