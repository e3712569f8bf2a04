"""Runs: their guarded stages, their features, and the profiles that they learn."""
