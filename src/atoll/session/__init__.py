"""What any front end needs of a cluster: handles, programs, the launch window, uploads and fetches.

`opening.open_session` gives a `session.ClusterSession`. The session does no I/O itself: it sends over the seams of
`connection`, and what arrives is given to `ClusterSession.handle`. It knows no front end's protocol.
"""
