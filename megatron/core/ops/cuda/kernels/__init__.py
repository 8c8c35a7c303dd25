"""Triton kernels of the CUDA table: each reads and writes memory once and computes in float32.

Nothing but the modules beside this package imports them; importing them needs triton. With ``TRITON_INTERPRET=1`` in
the environment before the import they run on a CPU, slowly, which is how tests check them without a GPU.
"""
