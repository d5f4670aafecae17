"""The family of an oracle, from few queries."""
