"""Between the messages of the IFRT protocol and `atoll.ir`: dtypes, shapes, layouts, shardings, statuses."""
