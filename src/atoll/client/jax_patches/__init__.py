"""What Atoll changes of JAX in the user's process, one file a patch."""
