"""The passes that lower a program, and the cut into plans after them.

A pass is one file here and one line of `PASSES`, in the order in which they run: see `lowering_pass`.
"""

# By module and class: they are imported where programs are lowered, which is only the controller.
PASSES = (
    "atoll.ir.passes.simplify_pass:SimplifyPass",
    "atoll.ir.passes.place_pass:PlacePass",
    "atoll.ir.passes.transfers_pass:ExplicitTransfersPass",
)
