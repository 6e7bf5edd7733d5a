"""What shows a cluster over HTTP: its metrics, and a page. A process of its own, with one identity.

Everything here reads `telemetry.watch.Watch`, which one `poller.Poller` keeps up to date while somebody looks.
"""
