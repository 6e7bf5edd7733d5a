"""What starts, watches and ends the processes of a cluster. The seam for new engines is `engine`."""
