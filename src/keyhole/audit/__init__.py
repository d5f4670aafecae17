"""What a defence costs an attacker: recover a box behind each of several, with ever more queries."""

from keyhole.audit.audit import MULTIPLES, audit
from keyhole.audit.defences import Defence, default_defences, parse_defence
from keyhole.audit.result import Audit, Row

__all__ = ["MULTIPLES", "Audit", "Defence", "Row", "audit", "default_defences", "parse_defence"]
