"""Checks of untrusted input: JSON, paths and text. Every layer may import these."""
