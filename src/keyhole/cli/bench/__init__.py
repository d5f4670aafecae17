"""The command `keyhole bench`: what recoveries cost on this machine, in queries and in time, and how that grows."""

from keyhole.cli.bench.command import bench

__all__ = ["bench"]
