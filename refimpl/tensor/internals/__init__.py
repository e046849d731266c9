"""The machinery beneath the splits, which a reader of the ideas can skip.

`ids` checks token ids and targets, and that all ranks of a group have the same.
"""
