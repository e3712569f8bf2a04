"""The one package that knows ComfyUI: what is asked of it, and its own MODEL and VAE under the guard and the probe."""
