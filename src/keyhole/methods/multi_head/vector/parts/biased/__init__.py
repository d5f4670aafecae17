"""Heads whose keys and queries have biases, beside positions: values from long tokens, logits at natural norms."""
