"""Building blocks of a persistent kernel, written in the language: ring, exchanges, matvec, attention, sampling.

Each block emits both what the producer warp and what the consumer warps do for it. They know the language and the plan,
and nothing of a particular model's weights or of the runtime."""
