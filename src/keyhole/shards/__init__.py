"""Examples in files of many kinds, read block by block: a shard is what one worker reads."""
