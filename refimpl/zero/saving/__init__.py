"""Saves an engine's state and loads it again, at any stage and on any number of ranks.

Read `sharded` first: each rank writes its shards, and reads what it needs. `consolidated` puts all shards together on
rank 0 instead. Beneath: `durable` writes files that survive a crash, `manifest` makes a folder of them one saved state,
`description` says what has to be the same where it is loaded, and `optimizer_state` cuts the optimizer's state into
pieces. What is read may be damaged: `form` checks that a manifest or a state_dict has the form that it should have, and
`coverage` that each element is in one file. `mixin` gives the engines their methods.
"""
