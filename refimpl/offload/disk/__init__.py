"""The parts of `DiskStore`, in the order of reading: `file` (aligned blocks of a file that has no name), `flat` (many
tensors as one run of bytes), `checksum`, `buffer_pool` (a fixed number of buffers, lent and given back), `transfers`
(threads), `pace` (as slow as a link), `extents` (which bucket has which part of the file), `space` (all of it).
"""
