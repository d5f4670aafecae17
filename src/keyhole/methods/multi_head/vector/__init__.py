"""Several heads behind as many outputs as heads, or more."""
