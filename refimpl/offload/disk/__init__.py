"""The parts of `DiskStore`, in the order of reading: `file` (aligned blocks of a file that has no name), `flat` (many
tensors as one run of bytes), `checksum`, `buffers` (a fixed number, lent and given back), `transfers` (threads), `pace`
(as slow as a link), `places` (which bucket has which place), `space` (all of it).
"""
