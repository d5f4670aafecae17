"""What tables share: random heads, oracles of other kinds, real weights, rows kept on disk."""
