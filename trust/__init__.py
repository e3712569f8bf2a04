"""The gates for what other people made: their JSON, their paths, their text. Every layer may import these."""
