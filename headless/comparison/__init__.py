"""Runs of one workflow in several precisions, beside each other."""
