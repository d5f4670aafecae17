"""Run folders: settings carried out, written and read."""
