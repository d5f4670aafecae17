"""What a defence costs an attacker: recover an oracle behind each of several, with ever more queries."""

from keyhole.audit.audit import MULTIPLES, audit
from keyhole.audit.defences import Defence, default_defences, parse_defence
from keyhole.audit.result import Audit, Cell

__all__ = ["MULTIPLES", "Audit", "Cell", "Defence", "audit", "default_defences", "parse_defence"]
