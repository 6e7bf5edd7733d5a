"""Programs and compiled functions: registered, compiled, launched, failed."""
