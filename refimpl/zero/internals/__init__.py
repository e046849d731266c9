"""The machinery beneath the engines, which a reader of the ideas can skip.

`trained` checks what an engine is given, `elementwise` finds out whether an optimizer can be run on shards, `norms`
clips by a norm over all ranks, `in_shards` stands in `parameter.grad` for a gradient in shards, and `as_optimizer` lets
an engine stand where an optimizer is expected.
"""
