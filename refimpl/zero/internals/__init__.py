"""The machinery beneath the engines, which a reader of the ideas can skip.

Of a stage: `backwards` (when a unit's backward ends), `casts` (autocast's copies of weights), `starting` (a model that
never exists whole), `store` (where shards stay), `writes` (what others than the optimizer write to parameters), `hook`
(what reduces gradients in place of a collective), `persistence` (all of it, to `refimpl.saving`). Beside it:
`under_way` (bytes that are on their way) and `timeline` (which collectives overlap with which computation).

`trained` checks what an engine is given, `elementwise` finds out whether an optimizer can be run on shards, `norms`
clips by a norm over all ranks, `in_shards` stands in `parameter.grad` for a gradient in shards, and `as_optimizer` lets
an engine stand where an optimizer is expected.
"""
