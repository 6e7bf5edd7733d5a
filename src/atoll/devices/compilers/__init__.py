"""What describes compiled programs to a worker."""
