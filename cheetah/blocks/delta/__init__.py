"""Gated DeltaNet in a step: what its product publishes, what blocks remember, and the norm of what that makes."""
