"""The figures and tables of the paper's evaluation, measured again."""
