"""Hosts that run a workflow: this process, or a ComfyUI checkout that is started for it."""
