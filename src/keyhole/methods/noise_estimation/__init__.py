"""How answers err, from few queries."""
