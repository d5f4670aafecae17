"""`python -m keyhole` is the command `keyhole`."""

from keyhole.cli import main

main()
