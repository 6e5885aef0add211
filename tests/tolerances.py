"""Every tolerance by which a kernel's numbers may differ from a reference's, in one place.

The kernel rounds to bf16 (8 significant bits) what enters a matrix product, queries, keys, values and the vectors that
blocks exchange; everything else is float32. All are relative L2 errors unless said otherwise.
"""

LOGITS = 0.05
"""Logits of a position, random or trained weights, against float32 (seen: up to 0.034; rounding the reference to bf16
where products begin gives 0.03 by itself)."""

EIGHT_BIT_LOGITS = 0.35
"""The same with keys and values of 8 bits (3 of them mantissa): half a step is 6 % of a number (seen: up to 0.27)."""

ROUNDINGS = 2.5
"""By so much a kernel's KL divergence from float32 may exceed that of the float32 reference with its vectors rounded to
bf16: it rounds in other places (seen: 0.4 to 1.75 over 64 positions of trained models in five quantised formats)."""

SMALL_MARGIN = 0.25
"""A greedy step whose two highest logits are nearer than this may go the other way; in units of logits, of which the
largest error seen is 0.1."""

ATTENTION_OUTPUT = 6e-3
"""One head's attention output with softmax weights and output in bf16 (simulated maximum on normal data 2.9e-3)."""

ATTENTION_WEIGHTS = 4e-3
"""The same with the output in float32 (simulated maximum 2.0e-3)."""

ATTENTION_LSE = 1e-5
"""A row's log-sum-exp: the absolute error over max(1, |LSE|) (simulated maximum 3e-7)."""

MATVEC = 1e-5
"""A product of bf16 numbers added in float32, against float64."""

MATVEC_WITH_OUTLIERS = 1e-4
"""The same where two activations are a thousand times the others, and weights are integers of which a zero point is
taken away after the product."""

SAMPLING_MARGIN = 1e-4
"""Two candidates nearer than this may change places: logits / temperature + noise is rounded to float32."""

LOGPROB = 1e-4
"""A log-probability made of float32 logits, against float64: the logarithm of a sum of up to 10^5 numbers."""
