"""A job to try stallscope on without a GPU: emulated CUDA and NCCL, a training-like loop, faults to inject.

emulated/  C sources of libcudart.so.12 and libnccl.so.2, independent of the scenarios
build      compiles them into a cache folder
gpu        the two libraries by ctypes
plan       the parameters of a job: one JSON file that launcher and ranks share
job        one rank: the loop
faults     the faults that a rank injects into itself
outside    the faults from other processes: signals, programs on its CPU, a slow server
live       starts a job, disturbs it, ends it
scenarios  the scenarios of `stallscope demo`, live or simulated
traced     a live scenario under the agent: the live demo
"""
