"""Messages of the IFRT proxy protocol between JAX's proxy client and a session.

`make protos` generates `x_pb2.py` from each `x.proto`. Field numbers and types match the wire format;
`tests/protocol/test_protos.py` compares them with the installed jaxlib. Names are not part of the wire format.

    transport    messages outside the request stream: versions, session metadata, the host buffer store
    session      Request and Response, and the requests about the session itself
    arrays       requests that create, move, copy, read and delete arrays
    executables  requests that compile and run, and host callbacks
    values       parts of requests: dtypes, shapes, array specs, attributes
    shardings    contents of serialized shardings and layouts
    compile      contents of serialized programs and compile options
    status       errors, and the memory report that an error can contain
    xla          the part of XLA's own data model that IFRT uses
"""
