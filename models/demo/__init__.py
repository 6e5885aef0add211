"""The demo model: its grammar, its training, its files."""
