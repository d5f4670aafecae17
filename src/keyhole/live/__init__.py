"""A local page that shows recoveries while they run, starts demos, stops, resumes and compares them."""

from keyhole.live.manager import Runs
from keyhole.live.server import LiveServer

__all__ = ["LiveServer", "Runs"]
