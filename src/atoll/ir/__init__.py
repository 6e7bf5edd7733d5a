"""Programs, plans, and the lowering of programs to plans.

Each request of a client is a `Program` on virtual devices. Lowering places it on physical devices and cuts it into one
`Plan` per host. Both are plain data. This package does no I/O.
"""
