"""On CUDA: a step in its arena, captured once, and played again without a call to the allocator.

An operation without an `out=` of its own computes in memory of the caching allocator. Captured in a CUDA graph, it
has memory of the graph's own pool, at the same addresses each time; all else is in the arena. Python does not run again
either: the graph plays the same kernels on the same addresses. So arguments are copied to where the step found them,
and what it returned is copied out, to one of two places that the caller has let go.
"""

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .arena import Arena
from .execute import Follower


def aside(function, *args, **kwargs):
    """Call a function on a stream of its own, as what comes before a capture has to be: autograd remembers on which
    stream it made a node."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = function(*args, **kwargs)
    current.wait_stream(stream)
    return result


class PlayedStep:
    """Captures `step(*args, **kwargs)` in an arena by its plan; `played(*args, **kwargs)` then plays it.

    The step must be one that a CUDA graph can hold: it reads no value back (`item()`), makes its gradients anew
    (`optimizer.zero_grad()` first), and its optimizer is `capturable`. The capture itself is a step that counts: its
    result is `first`. RuntimeError if it departed from its plan.
    """

    def __init__(self, step, args, kwargs, trace, plan, arena):
        leaves, self._structure = tree_flatten((args, kwargs))
        # a graph reads the addresses that it was captured with
        self._inputs = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
        args, kwargs = tree_unflatten(self._inputs, self._structure)
        follower, self._graph = Follower(trace, plan, arena, {}), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph), follower:
            self._result = step(*args, **kwargs)
        follower.end()
        if follower.departures:
            raise RuntimeError(f"while it was captured the step left its plan: {follower.departures[0]}")
        self._arena, self._places = arena, {}  # id of a result → (an arena of two places, its bytes)
        for each in tree_flatten(self._result)[0]:
            if isinstance(each, torch.Tensor):
                size = -(-each.nbytes // trace.alignment) * trace.alignment
                self._places[id(each)] = Arena(2 * size, trace.device, trace.alignment), size
        self._graph.replay()  # a capture computes nothing
        self.first = tree_map(self._copied_out, self._result)

    def __call__(self, *args, **kwargs):
        """Play the step on these arguments, of the same shapes, and return what it returns. ValueError for others."""
        leaves, structure = tree_flatten((args, kwargs))
        for mine, given in zip(self._inputs, leaves, strict=True) if structure == self._structure else ((0, None),):
            if isinstance(mine, torch.Tensor) and isinstance(given, torch.Tensor) and mine.shape == given.shape:
                mine.copy_(given)
            elif type(mine) is not type(given) or mine != given:
                raise ValueError(f"an argument {given!r}: the step was captured with {mine!r}; capture it anew")
        self._graph.replay()
        return tree_map(self._copied_out, self._result)

    def _copied_out(self, result):
        if not isinstance(result, torch.Tensor):
            return result
        places, size = self._places[id(result)]
        for offset in (0, size):
            if places.occupant(offset, size) is None:
                kept = places.empty_strided(offset, result.shape, result.stride(), result.dtype, result.nbytes)
                return kept.copy_(result.detach())  # the next replay writes over the original
        return result.detach().clone()  # the caller has kept two: a third is the caching allocator's
