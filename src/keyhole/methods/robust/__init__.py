"""One head behind noise, a tolerance, decimals or a dtype."""
