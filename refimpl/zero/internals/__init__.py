"""The machinery beneath the engines, which a reader of the ideas can skip.

`sharded_optimizer` runs the caller's optimizer on this rank's shards, `elementwise` finds out whether that one can be
run so, `norms` computes a norm of sharded gradients, `consistency` finds ranks that are about to do different things,
and `as_optimizer` lets an engine stand where an optimizer is expected.
"""
