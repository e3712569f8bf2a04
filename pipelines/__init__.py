"""The model families, and how diffusers and OneDiff load, compile, sample and decode them. Imports no ComfyUI."""
