"""Several "machines" on one Linux box, for tests of what runs on many. Needs root, iproute2 and util-linux."""
