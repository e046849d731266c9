"""The parts of `TieredStore`, in the order of reading: `common/accesses` (the order of accesses, and what comes next),
`common/eviction` (Belady's rule and LRU on a trace), `tier` (room in one), `bucket_moves` and `placement` (what moves
where, and when), `step_simulator` (the same placement on a clock that only counts), `mover` (the same moves of real
bytes).
"""
