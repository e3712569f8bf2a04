"""A loaded model, and where its weights are."""
