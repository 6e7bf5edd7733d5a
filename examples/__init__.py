"""Complete scripts, which README.md describes. They are a package so that tests and benchmarks can import them."""
