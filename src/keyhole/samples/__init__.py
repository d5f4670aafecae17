"""Learning from random examples: no queries, only inputs and their outputs."""

from keyhole.samples.learn import learn

__all__ = ["learn"]
