"""Heads of other parts than those of a softmax."""
