"""Islands and their hosts: how they start, fail and restart."""
