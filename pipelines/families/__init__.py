"""The model families: their components, variants, latents and layers."""
