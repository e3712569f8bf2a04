"""Compilation through OneDiff: its backends, a block of a model, and compiled code that is kept."""
