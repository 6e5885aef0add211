"""A running server, as its clients see it: how fast it is, and whether it loses anything."""
