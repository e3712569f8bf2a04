"""A loaded model's weights: components, placement, offload, quantisation and activation memory."""
