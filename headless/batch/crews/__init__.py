"""The kinds of workers: actors of Ray, and running ComfyUIs."""
