"""The only package that calls ComfyUI: its services, the guard for its MODEL and VAE, the probe for its MODEL."""
