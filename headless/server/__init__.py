"""A running ComfyUI, over HTTP and its websocket."""
