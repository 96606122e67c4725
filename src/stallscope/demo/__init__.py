"""A job to try stallscope on without a GPU: emulated CUDA and NCCL, a training-like loop, faults to inject.

emulated/  C sources of libcudart.so.12 and libnccl.so.2; they know no scenario
build      compiles them into a cache folder
gpu        the two libraries by ctypes
plan       what a job is to do: one JSON file that launcher and ranks share
job        one rank: the loop
faults     what can be made to go wrong, by the rank itself
outside    what is done to a rank by others: signals, programs on its CPU, a slow server
live       starts a job, disturbs it, ends it
scenarios  the stories `stallscope demo` tells, for real or made up
traced     the same with the agent beside it: the live demo
"""
