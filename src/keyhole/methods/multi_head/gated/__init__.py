"""Several heads behind few outputs, all at once: whatever their logits, for tokens of bounded norm, and behind noise."""
