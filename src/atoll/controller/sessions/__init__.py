"""Sessions and what belongs to them: virtual devices, queries."""
