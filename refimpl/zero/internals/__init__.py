"""The machinery beneath the engines, which a reader of the ideas can skip.

Of a stage: `backwards` (when a unit's backward ends), `casts` (autocast's copies of weights), `initializers` (a model
that never exists whole), `store` (where shards stay), `writes` (parameters that a module or a user has written),
`hook` (what reduces gradients in place of a collective), `persistence` (all of it, to `refimpl.saving`). Beside it:
`peak_of_step` (the peak in closed form) and `step_timeline` (which collectives overlap with which computation).

`argument_checks` checks what an engine is given. `elementwise` finds out whether an optimizer can be run on shards, and
`companion` whether that changes later. `norms` clips by a norm over all ranks, `in_shards` stands in `parameter.grad`
for a gradient in shards, and `as_optimizer` lets an engine stand where an optimizer is expected.
"""
