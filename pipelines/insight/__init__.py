"""Diagnosis: the plans for a machine, the estimates of VRAM, and the probe of a model's largest values."""
