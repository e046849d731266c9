"""What is alive in a training step of our GPT, moment by moment, as polynomials of the sequence length.

All bytes are sums of a few unit sizes. In the symbols of `memory.activation_bytes` (s sequence, b batch, h hidden,
a heads, g key heads, f MLP hidden, v vocabulary, e bytes an element):

    U = e·sb·h    K = U·g/a    Q = U + 2K    F = e·sb·f    S = e·ab·s²    V = e·sb·v    V₄ = 4·sb·v

Only S and the causal mask grow with s². Forward has no moment of its own here: the backward of its last block begins
with all that it kept, and takes more.
"""

from dataclasses import dataclass, replace
from functools import partial

from .polynomial import Quadratic

NOTHING = Quadratic()


@dataclass(frozen=True)
class Line:
    """One operation: what it takes and, of what is there, what is free after it.

    `takes`, `frees`: temporaries. `keeps`, `releases`: activations. `gradients`: of parameters; they stay.
    """

    name: str
    takes: Quadratic = NOTHING
    frees: Quadratic = NOTHING
    keeps: Quadratic = NOTHING
    releases: Quadratic = NOTHING
    gradients: int = 0


@dataclass(frozen=True)
class Moment:
    """What is alive right after an operation took what it takes: Quadratics, by category."""

    name: str
    activations: Quadratic = NOTHING
    gradients: Quadratic = NOTHING
    temporaries: Quadratic = NOTHING
    carried: Quadratic = NOTHING  # keys and values of a sequence in chunks, and their gradients

    @property
    def total(self):
        """Over the categories."""
        return self.activations + self.gradients + self.temporaries + self.carried

    def plus(self, other, times=1):
        """This moment with what is alive in the other, `times` over."""
        return replace(self, activations=self.activations + other.activations * times,
                       gradients=self.gradients + other.gradients * times,
                       temporaries=self.temporaries + other.temporaries * times)


class Tally:
    """Runs lines one after the other: `now`, and `moments`. `summed`: gradients were there, and new ones are added."""

    def __init__(self, summed=False):
        self.now, self.moments, self.summed = Moment(""), [], summed

    def run(self, lines, where):
        """Run `lines`; the moments are called "line, where"."""
        for line in lines:
            if self.summed:
                line = replace(line, takes=line.takes + line.gradients, frees=line.frees + line.gradients, gradients=0)
            here = self.now.plus(Moment("", line.keeps, NOTHING + line.gradients, line.takes))
            if line.name:
                self.moments.append(replace(here, name=f"{line.name}, {where}"))
            self.now = here.plus(Moment("", line.releases, temporaries=line.frees), -1)

    def run_blocks(self, lines, layers):
        """Run `lines(i)` of every block i, the last first. Each changes what is alive by the same bytes: those between
        the two ends are a multiplication."""
        if layers > 1:
            before = self.now
            self.run(lines(layers - 1), f"backward of block {layers - 1}")
            self.now = self.now.plus(self.now.plus(before, -1), layers - 2)
        self.run(lines(0), "backward of block 0")


def training_moments(z, summed=False):
    """The Moments of forward and backward of a model and batch in Sizes `z`. `summed`: gradients, not counted here,
    are there before; else they are None.

    If blocks are recomputed, each keeps its input alone and makes the rest again in its backward.
    """
    tally, layers = Tally(summed), z.config.layers
    each = z.U + z.random_state if z.recompute else z.block_kept
    tally.run([Line("", takes=Quadratic(c=4), keeps=z.around + each * (layers - 1))], "")
    if not z.recompute:
        tally.run([weighted_values(z, NOTHING)], f"forward of block {layers - 1}")
    tally.run([Line("", keeps=each)], "")
    tally.run(head(z), "head and loss")
    tally.run([Line("", keeps=z.mask * z.recompute)], "")
    tally.run_blocks(partial(block, z), layers)
    tally.run(embeddings(z), "embeddings")
    return tally.moments


def block(z, i):
    """Backward of block i."""
    lines = [*mlp(z), *attention(z, i)]
    if z.recompute:
        # The region keeps its input until its backward is over; a norm that copies its input has it once more.
        held = NOTHING if z.copies_input else z.U
        # What attention gave, and its sum with x; with dropout also what the MLP gave, without it is not ended.
        beside = z.random_state + z.U * (1 + z.config.parallel_residual + z.dropout)
        again = Line("recomputed", takes=beside, frees=beside, keeps=z.block_kept - held)
        end = Line("end", releases=z.U + z.random_state - held + z.rotation * (i == 0))
        lines = [weighted_values(z, held), again, *lines, end]
    return lines


def head(z):
    """From the last block's output to the gradient of it. The loss is fp32 in any precision."""
    logits = z.V + z.V4 * (z.e != 4) + z.U * z.copies_input  # and the last block's output, if the norm keeps a copy
    yield Line("sums", takes=2 * z.U, frees=2 * z.U)
    yield Line("logits", takes=logits, keeps=z.norm_kept + z.U)
    yield Line("log-softmax", keeps=z.V4)
    yield Line("loss", keeps=Quadratic(c=4), takes=Quadratic(c=4), frees=logits + 4,
               releases=z.mask * z.recompute)  # nobody keeps it then: it is made again
    yield Line("loss backward", takes=z.V4 + 4, releases=Quadratic(c=4))
    yield Line("log-softmax backward", takes=z.V4, frees=z.V4, releases=z.V4)
    if z.e != 4:
        yield Line("logits' gradient", takes=z.V, frees=z.V4)
    waits = z.embedding * z.config.tied  # for the embedding's, which comes at the end
    yield Line("head", takes=z.U + waits, frees=z.V, releases=z.U, gradients=z.embedding - waits)
    yield from norm(z, residual=False)


def norm(z, residual=True, shared=False):
    """Backward of a norm: one gradient U comes, one goes; then the residual's is added to it.

    `shared`: of two norms with one input, the one whose backward is first. The input is kept and so is the gradient of
    the residual, which the other branch needs, too.
    """
    if z.pieces:
        yield from norm_in_pieces(z, z.wide_U, z.per_token, shared and not z.copies_input)
    else:
        yield Line("norm", takes=z.U, frees=z.U, releases=z.norm_kept - z.U * shared, gradients=z.norm_weight)
    if residual:
        yield Line("residual", takes=z.U, frees=z.U * (1 if shared else 2))


def norm_in_pieces(z, u, s, shared):
    """RMSNorm as a chain of small operations, in fp32 or wider."""
    if z.copies_input:
        yield Line("norm: to fp32", takes=u, frees=z.U)
    yield Line("norm: gain", takes=2 * u, frees=2 * u, releases=u, gradients=z.norm_weight)
    yield Line("norm: x/σ", takes=2 * u + s, frees=2 * u, releases=s)
    yield Line("norm: 1/σ", takes=4 * u - s, frees=3 * u, releases=u * (not shared))
    yield Line("norm: sum", takes=u, frees=2 * u)
    if z.copies_input:
        yield Line("norm: to 16 bits", takes=z.U, frees=u)


def linear(z, name, inputs, outputs, takes, frees, releases=NOTHING):
    """Backward of a linear layer. Its bias' gradient, a sum, is last; a recomputed input is gone by then."""
    weight, bias = z.e * inputs * outputs, z.e * outputs * z.config.bias
    if z.recompute and bias:
        yield Line(name, takes=takes, releases=releases, gradients=weight)
        yield Line(f"{name} bias", frees=frees, gradients=bias)
    else:
        yield Line(name, takes=takes, frees=frees, releases=releases, gradients=weight + bias)


def mlp(z):
    """Backward of x + MLP(norm(x)): the gradient of the output, U, is there and stays."""
    dropped = z.U * z.dropout
    if z.dropout:
        yield Line("MLP dropout", takes=z.U, releases=z.token_mask)
    yield from linear(z, "down", z.f, z.h, takes=z.F, frees=dropped, releases=z.F)
    if z.config.activation == "swiglu":
        yield Line("gate · up", takes=2 * z.F, frees=z.F, releases=2 * z.F)
        yield from linear(z, "up", z.h, z.f, takes=z.U, frees=z.F)
        yield Line("SiLU", takes=z.F, frees=z.F, releases=z.F)
        yield from linear(z, "gate", z.h, z.f, takes=z.U, frees=z.F, releases=z.U)
        yield Line("gate and up", takes=z.U, frees=2 * z.U)
    else:
        yield Line("GELU", takes=z.F, frees=z.F, releases=z.F)
        yield from linear(z, "up", z.h, z.f, takes=z.U, frees=z.F, releases=z.U)
    yield from norm(z, shared=z.config.parallel_residual)


def attention(z, i):
    """Backward of x + attention(norm(x)): the gradient of the output, U, is there and stays. Block 0's is the last that
    needs the rotation."""
    apart = z.config.parallel_residual  # then the sum is beside it already, and nobody else needs it
    if z.dropout:
        yield Line("attention dropout", takes=z.U, frees=z.U * apart, releases=z.token_mask)
    yield from linear(z, "projection", z.h, z.h, takes=z.U, frees=z.U * (z.dropout or apart), releases=z.projected)
    yield from fused_core(z) if z.flash else dense_core(z)
    if z.carried:  # all keys' gradients are added to the sums, those of the chunk come from there
        yield Line("keys and values", frees=2 * z.all_K)
    yield Line("q, k and v", takes=z.Q, frees=z.U if z.carried else z.Q,
               releases=z.rotation * (i == 0 and not z.recompute))
    yield Line("q, k and v in order", takes=z.Q, frees=z.Q)
    yield from linear(z, "qkv", z.h, z.h + 2 * z.kv, takes=z.U, frees=z.Q, releases=z.U)
    yield from norm(z)


def weighted_values(z, held):
    """In a block's forward, the moment when its attention has all that it takes at once; with dropout that can be more
    than in backward. `held`: what is there of it already."""
    kept = z.norm_kept + z.U * (1 + (z.copies_input and not z.recompute)) - held
    if z.flash:
        return Line("fused attention", takes=kept + z.fused, frees=kept + z.fused)
    c = z.config
    rotary, copied = c.positions == "rotary", not z.part and c.kv_heads > 1  # the turned keys once more
    rotated = z.U * rotary + z.K * (rotary and copied)
    scaled = z.U * (c.heads == c.kv_heads and z.batch > 1 and not z.part)  # and copied for the product
    rows = Quadratic(b=8 * c.heads // c.kv_heads)
    kept = kept + z.random_state * z.recompute  # of the moment, while another is in force
    alive = kept + z.Q + rotated + scaled + z.core + z.S + rows
    return Line("weighted values", takes=alive + z.U, frees=alive + z.U)


def dense_core(z):
    """From the gradient of the output to those of q, k and v; the scores' are as large as the scores."""
    yield Line("output in order", takes=z.U, frees=z.U)
    yield Line("values", takes=z.all_K + z.S, frees=z.U, releases=z.kept_K + z.S * z.dropout)
    if z.dropout:
        yield Line("score dropout", takes=z.S, frees=z.S, releases=z.score_mask)
    yield Line("softmax", takes=z.S, frees=z.S, releases=z.S)
    yield Line("causal mask", takes=z.S, frees=z.S, releases=z.causal)
    yield Line("queries and keys", takes=z.U + z.all_K, frees=z.S, releases=z.U + z.kept_K)


def fused_core(z):
    """The same in one kernel, which makes the scores again and never has all of them."""
    yield Line("fused attention", takes=z.U + 2 * z.all_K, frees=z.U, releases=z.fused)


def embeddings(z):
    """The gradient of the first block's input becomes those of the tables."""
    if z.config.dropout:
        yield Line("embedding dropout", takes=z.U, frees=z.U, releases=z.token_mask)
    if z.config.positions == "learned":
        yield Line("positions", takes=z.tokens * (z.e * z.h), frees=z.tokens * (z.e * z.h),
                   releases=z.tokens * 8, gradients=z.positions)
    if z.config.tied:
        yield Line("embedding", takes=NOTHING + z.embedding, frees=z.U)
        yield Line("embedding and head", frees=NOTHING + 2 * z.embedding, gradients=z.embedding)
    else:
        yield Line("embedding", frees=z.U, gradients=z.embedding)
