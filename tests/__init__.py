"""The tests, in the order of the tree they mirror; `pytest` alone runs those that are quick and need no GPU."""
