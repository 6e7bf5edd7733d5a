"""Messages of the IFRT proxy protocol: what travels between JAX's proxy client and a session.

Each `x.proto` here has its generated `x_pb2.py` beside it (`make protos` writes them anew).  Field numbers
and types are facts of the wire and are held against the installed jaxlib by `tests/protocol/test_protos.py`;
the names are ours, since names do not travel.

    transport    what stands outside the request stream: versions, session metadata, the host buffer store
    session      Request and Response, and the requests that concern the session itself
    arrays       requests that make, move, copy, read and drop arrays
    executables  requests that compile and run, and host callbacks
    values       what requests are made of: dtypes, shapes, array specs, attributes
    shardings    what stands inside a serialized sharding or layout
    compile      what stands inside a serialized program or its compile options
    status       errors, and the memory report that an error may carry
    xla          the part of XLA's own data model that IFRT borrows
"""
