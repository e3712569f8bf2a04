"""Models on disk and on the hub: folders, single files, LoRAs, downloads, and the checks of their files."""
