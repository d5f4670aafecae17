"""Oracles behind the Open Inference Protocol v2."""
