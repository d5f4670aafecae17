"""One head of low rank from random queries."""
