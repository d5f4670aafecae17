"""Whoever does independent pieces of work: this process, others of this machine, a cluster."""
