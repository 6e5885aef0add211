"""The functions of one number that decoders apply, in float32 numpy."""

from __future__ import annotations

import math

import numpy as np

from cheetah.models.rounding import F32


def silu(x: F32) -> F32:
    """x times the logistic function of x."""
    with np.errstate(over="ignore"):  # exp overflows to inf for a very negative x, and silu is then -0
        return np.asarray(x / (1 + np.exp(-x)))


def logistic(x: F32) -> F32:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: F32) -> F32:
    """log(1 + exp(x))."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def gelu(x: F32) -> F32:
    """The form with a hyperbolic tangent."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))


def relu2(x: F32) -> F32:
    """The square of what is above 0."""
    return np.asarray(np.maximum(x, 0) ** 2)


ACTIVATIONS = {"silu": silu, "gelu": gelu}
