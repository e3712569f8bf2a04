"""One run computed by several processes together, one a GPU."""
