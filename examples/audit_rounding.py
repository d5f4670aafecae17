"""Find out how many decimals a service may answer with before its attention head is anybody's.

    python examples/audit_rounding.py

Rounds the answers of a random head to 1 to 5 decimals, with tokens of norm 1 at most and with tokens of any norm, and
lets an attacker spend 4 and 32 times the fewest queries that exact answers would take.
"""

from __future__ import annotations

import keyhole as kh

TARGET = "demo:single-head?width=8"
DECIMALS = (1, 2, 3, 4, 5)
BUDGETS = (4, 32)


def main() -> None:
    """Audit and print what an attacker is left with."""
    free = [f"round:{k}" for k in DECIMALS]
    clipped = [f"round:{k}+clip:1" for k in DECIMALS]
    found = kh.audit(TARGET, defences=[*free, *clipped], budgets=BUDGETS)
    print("error of the attacker's copy, relative; 1 is what a guess of nothing has")
    print(f"{'':>18}" + "".join(f"{budget:>6} × queries" for budget in BUDGETS))
    for defence in found.defences:
        errors = [row.error for row in found.of(defence)]
        print(f"{defence:>18}" + "".join(f"{error:>16.0e}" for error in errors))
    for sentence in (found.sentences[3], found.sentences[-3]):
        print(f"· {sentence}")


if __name__ == "__main__":
    main()
