"""Several heads behind few outputs, all at once: any logits, tokens of bounded norm, answers that err."""
