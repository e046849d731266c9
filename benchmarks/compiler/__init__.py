"""What Triton's compiler makes of the attention kernels, on any machine.

Read in this order: `compiled` compiles one kernel and reports the resources it takes, `sass` lists the instructions of
many, `processes` compiles many kernels in other processes, `table` has the cases of the kernels in
refimpl/attention/kernels/configs.py, and `hopper` and `gluon_forward` have those of the kernels for Hopper.
"""
