"""Compilation through OneDiff: backends, compiled blocks, the rule of 'auto', and the compile cache."""
