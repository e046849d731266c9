"""What Triton's compiler makes of the attention kernels, on any machine. In reading order: `compiled` compiles one
kernel and says what it takes, `sass` lists the instructions of many, `processes` compiles many in processes of their
own, `table` has the cases of the kernels in refimpl/attention/kernels/configs.py, `hopper` and `gluon_forward` those of
the kernels for Hopper.
"""
