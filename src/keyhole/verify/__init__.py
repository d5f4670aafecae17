"""Whether an oracle is the one that parameters describe, from a handful of queries."""

from keyhole.verify.verdict import Difference, Verdict
from keyhole.verify.verify import QUERIES, verify

__all__ = ["QUERIES", "Difference", "Verdict", "verify"]
