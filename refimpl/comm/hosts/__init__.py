"""Ranks on several hosts: who is where, who differs, who failed.

In the order of reading:

    schedulers    RANK and the like from what SLURM and MPI set
    joining       torch's store, and what each rank says of itself when it begins
    facts         on which host each rank is; what has to be alike on all
    notes         what a rank leaves in the store, twice a second: that it lives, what it does, how it failed
    patience      how long a rank may do nothing
    watch         the thread that writes and reads these notes, and the one that ends a wait in vain
    verdicts      from all ranks' notes to who is to blame
    terminated    a rank that is ended by SIGTERM says so first
    sockets       the connections between ranks, to be closed where a wait for a rank would never end
"""
