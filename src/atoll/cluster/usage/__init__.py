"""Usage records of a cluster and duration estimates of functions, and the files that store them."""
