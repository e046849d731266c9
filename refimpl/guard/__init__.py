"""A recorder for the long run: who held what when it failed at step 3,000. `memory.guard`, `refimpl run`.

Order of reading: `guard` (the context), `loop` (where in its loop a program is), `meters` (what is taken),
`known_bytes` (what is known by name), `step_log` (a line a step); then what is said meanwhile: `growth`,
`longest_batch`, `traced_steps`, `sayings`; then a failure: `live` (who holds what), `causes`, `failure` (the report);
`oom_command` and `run_command`, `trainer_callback` and `lightning_callback`; `budget` is for CI.
"""

from .guard import Guard

__all__ = ["Guard"]
