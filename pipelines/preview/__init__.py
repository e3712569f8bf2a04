"""What is shown of a run while it samples."""
