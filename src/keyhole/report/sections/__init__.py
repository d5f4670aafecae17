"""The sections of a page, one module each."""
