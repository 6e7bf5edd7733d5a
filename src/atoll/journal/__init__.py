"""All that a controller has handled, as bytes: for people who ask why, and for a controller that restarts."""
