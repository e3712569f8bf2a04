"""A model on disk, or on its way there: folders, single files, LoRAs, and whether they are whole."""
