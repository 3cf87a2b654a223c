"""Tables that others published, by their formulas and in their own columns: one file a table."""
