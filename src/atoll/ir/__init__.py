"""Programs: what a client asks, free of locations; and plans: what each host does for it.

Everything that a client asks becomes a `Program` over virtual devices. Lowering places it and cuts it into one `Plan`
per host. Both are plain data; nothing here does I/O.
"""
