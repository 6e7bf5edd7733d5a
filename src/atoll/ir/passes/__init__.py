"""The passes of lowering, and the cut into plans after them.

A pass is one file in this package and one line of `PASSES`, in the order in which they run: see `lowering_pass`.
"""

# As "module:class": only processes that lower programs import the passes.
PASSES = (
    "atoll.ir.passes.simplify_pass:SimplifyPass",
    "atoll.ir.passes.place_pass:PlacePass",
    "atoll.ir.passes.transfers_pass:ExplicitTransfersPass",
)
