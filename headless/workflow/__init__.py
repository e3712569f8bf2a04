"""Workflows as data: reading, checking and changing them."""
