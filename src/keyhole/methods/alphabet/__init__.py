"""One head behind a finite alphabet of tokens."""
