"""Whether this card computes what the pack takes for granted, and what later runs make of that."""
