"""Learning from shards: sums over each are added up, and no file is held whole."""
