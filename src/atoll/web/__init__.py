"""Show a cluster over HTTP, from a separate process: its metrics, and a page.

Everything here reads a `telemetry.watch.Watch`, which a `poller.Poller` updates while anyone views it.
"""
