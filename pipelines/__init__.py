"""diffusers and OneDiff: what a family is made of, and how it is loaded, compiled, sampled and decoded. No ComfyUI."""
