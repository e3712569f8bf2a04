"""A run: its stages, each of which is guarded, and what it taught."""
