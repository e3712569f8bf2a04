"""`onediff-guard demo`, and the small model that it is shown on."""
