"""Sessions with a cluster, for any front end: handles, programs, the launch window, uploads and downloads.

`session_opening.open_session` returns a `cluster_session.ClusterSession`. The session does no I/O: it sends through the
interfaces of `session_interfaces`, and its owner passes arriving messages to `ClusterSession.handle`. It does not
depend on the protocol of a front end.
"""
