"""Numerics: which dtype, how to rerun in fp32, and how to notice that a step failed.

Works on any `torch.nn.Module`; knows neither diffusers nor ComfyUI.
"""
