"""The parts of `TieredStore`, in the order of reading: `ground/accesses` (the order of accesses, and what comes next),
`ground/eviction` (Belady's rule and LRU on a trace), `tier` (room in one), `moves` and `plan` (what moves where, and
when), `simulate` (the same plan on a clock that only counts), `mover` (the same moves of real bytes).
"""
