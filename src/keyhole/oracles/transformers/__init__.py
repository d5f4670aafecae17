"""Layers of transformers models as oracles, asked through the model's own code."""
