"""The step cache of a run: what its budget is counted by, and where it stands."""
