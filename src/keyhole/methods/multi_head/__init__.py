"""Several heads added up."""
