"""What a client of IFRT has loaded, by what runs it: compiled functions, programs, Python on the hosts, checkpoints."""
