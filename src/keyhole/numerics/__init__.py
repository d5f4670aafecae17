"""Pure functions on arrays: nothing here knows of oracles or plans."""
