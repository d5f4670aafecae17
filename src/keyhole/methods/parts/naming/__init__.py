"""What the parts of one head of attention are called, from few queries."""
