"""Comparison of one workflow's runs in several precisions."""
