"""Islands and their hosts: which there are, how they are lost and come back."""
