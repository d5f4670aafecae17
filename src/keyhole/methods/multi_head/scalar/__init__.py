"""Several heads behind fewer outputs than heads."""
