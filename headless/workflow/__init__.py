"""A workflow as data: read, checked, and what is set in it."""
