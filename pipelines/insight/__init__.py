"""What would run on a machine, and why; what a model reaches."""
