"""The console command `onediff-guard`: ComfyUI workflows without a browser, on three hosts."""
