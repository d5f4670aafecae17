"""One head from answers rounded to decimals or to a dtype."""
