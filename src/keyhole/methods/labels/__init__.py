"""One attention head of which only labels are told."""
