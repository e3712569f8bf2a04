"""What a family of models is: its parts, variants, latents and layers."""
