"""The six phases of Chen & Li."""
