"""What a defence costs an attacker: recover an oracle behind each of several, with ever more queries."""

from keyhole.audit.audit import MULTIPLES, audit
from keyhole.audit.defences import Defence, default_defences, parse_defence
from keyhole.audit.policy import Rule, parse_rule, read_policy, violations
from keyhole.audit.protection import Protection, protections
from keyhole.audit.result import Audit, Cell

__all__ = [
    "MULTIPLES",
    "Audit",
    "Cell",
    "Defence",
    "Protection",
    "Rule",
    "audit",
    "default_defences",
    "parse_defence",
    "parse_rule",
    "protections",
    "read_policy",
    "violations",
]
