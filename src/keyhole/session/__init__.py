"""Methods driven against oracles: batches, one at a time or several, within a budget, and every answer kept."""

from keyhole.session.lanes import open_lanes
from keyhole.session.session import Session, box_of

__all__ = ["Session", "box_of", "open_lanes"]
