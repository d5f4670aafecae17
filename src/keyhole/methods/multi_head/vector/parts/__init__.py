"""Heads of other attention than plain softmax, with several outputs: long tokens beside a short last one."""
