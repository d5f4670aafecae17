"""Any oracle behind the Open Inference Protocol v2, to rehearse on one's own machine what strangers could do to it."""

from keyhole.serve.served_oracle import Limits, ServedOracle
from keyhole.serve.server import Server

__all__ = ["Limits", "ServedBox", "ServedOracle", "Server"]

ServedBox = ServedOracle  # its first name
