"""Model states in closed form: what a parameter costs before the first activation.

With Ψ parameters, bytes = Ψ · (weight + gradient + master + k · state), k = 0 for SGD, 1 with momentum, 2 for Adam and
AdamW. "ZeRO" (Rajbhandari et al. 2020), section 3.1, counts mixed-precision Adam so: 2 + 2 + 12 = 16.
"""

from dataclasses import dataclass
from numbers import Real

from .ledger import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, Ledger


@dataclass(frozen=True)
class Precision:
    """Bytes per element of each thing that a recipe keeps for a parameter."""

    weight: int
    gradient: int
    master: int  # an fp32 copy of the weight, 0 if there is none; the optimizer holds it
    state: int


PRECISIONS = {
    "fp32": Precision(weight=4, gradient=4, master=0, state=4),
    "bf16": Precision(weight=2, gradient=2, master=0, state=2),
    "bf16 + fp32 master": Precision(weight=2, gradient=2, master=4, state=4),
    "bf16 + fp32 master and gradients": Precision(weight=2, gradient=4, master=4, state=4),
}
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def model_state_bytes(parameters: int, optimizer: str = "adamw", precision: str = "fp32", tensors: int = 0) -> Ledger:
    """Predict the model states of `parameters` = Ψ when every gradient is there: a Ledger (bytes).

    `tensors`: how many parameter tensors there are; Adam keeps an fp32 step counter, 4 bytes, for each (on the CPU,
    also when the model is on a GPU, unless it is capturable or fused). Raises ValueError for an unknown recipe and for
    what is no count (7e9 is one).
    """
    if optimizer not in STATES:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(STATES)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
    for name, count in (("parameters", parameters), ("tensors", tensors)):
        if isinstance(count, bool) or not isinstance(count, Real) or not count >= 0 or count % 1:
            raise ValueError(f"{name}={count!r}: expected a count, 0 or more")
    p, k = PRECISIONS[precision], STATES[optimizer]
    # Adam's step count, an fp32 tensor for each parameter
    counters = 4 * tensors if optimizer in ("adam", "adamw") else 0
    return Ledger({
        PARAMETERS: parameters * p.weight,
        GRADIENTS: parameters * p.gradient,
        OPTIMIZER_STATE: parameters * (p.master + k * p.state) + counters,
    })


def bytes_per_parameter(optimizer: str = "adamw", precision: str = "fp32") -> int:
    """Return the bytes (int) of model states for one parameter: weight, gradient, master and optimizer state.

    16 for Adam in fp32, and 16 again with bf16 weights and an fp32 master ("ZeRO", Rajbhandari et al. 2020, section
    3.1). Step counters, a few bytes a tensor, are in `model_state_bytes`, which has the names and the errors.
    """
    return model_state_bytes(1, optimizer, precision).total
