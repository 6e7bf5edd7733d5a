"""Translation between messages of the IFRT protocol and types of `atoll.ir`.

All input from clients is checked. Invalid input raises only INVALID_ARGUMENT or UNIMPLEMENTED, and RESOURCE_EXHAUSTED
if an array is too large.
"""
