"""What runs a workflow: this process, or a checkout that is started for it."""
