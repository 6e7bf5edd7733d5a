"""The passes of lowering.

A pass is a generator function that takes a program and returns a program with the same results. To add one, write a
file in this package and add a line to `PASSES`, in the order in which passes run.

A pass runs on the controller's thread: it does no I/O, reads no clock, and yields after each node. Its time depends on
the number of nodes, not of shards. It raises StatusError, with INVALID_ARGUMENT or UNIMPLEMENTED, for a program that it
does not support. The client gets that error.
"""

# As "module:function".
PASSES = (
    "atoll.ir.passes.wide_transfers_pass:split_wide_transfers",
    "atoll.ir.passes.simplify_pass:simplify",
)
