"""Programs and compiled functions: registered, compiled, launched, failed; and what the controller has to say."""
