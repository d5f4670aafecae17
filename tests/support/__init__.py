"""What tests share: oracles, cases, commands, servers and browsers."""
