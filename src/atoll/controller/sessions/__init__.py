"""Sessions, and the requests of their proxies."""
