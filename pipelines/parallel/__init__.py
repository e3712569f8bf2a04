"""Parallel runs: several processes, one per GPU, compute one run together."""
