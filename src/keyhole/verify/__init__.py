"""Whether a box is the one that parameters describe, from a handful of questions."""

from keyhole.verify.run import QUERIES, verify
from keyhole.verify.verdict import Difference, Verdict

__all__ = ["QUERIES", "Difference", "Verdict", "verify"]
