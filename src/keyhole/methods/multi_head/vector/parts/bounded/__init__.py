"""Several heads of any positions whose tokens may not be long."""
