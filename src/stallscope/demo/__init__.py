"""A job to try stallscope on without a GPU: emulated CUDA and NCCL, a training-like loop, faults to inject.

emulated/     C sources of libcudart.so.12 and libnccl.so.2, independent of the scenarios
build         compiles them into a cache folder
gpu           the two libraries, called through ctypes
real_gpu      the GPUs of this machine, and a kernel of a given duration
plan          the parameters of a job: one JSON file that launcher and ranks share
job           one rank: the loop
faults        the faults that a rank injects into itself
outside       the faults from other processes: signals, programs on its CPU, a slow server
live_demo     starts a job, disturbs it, ends it
machines      several machines on one host, each with an agent
scenarios     the scenarios of `stallscope demo`, live or simulated
traced        a live scenario under the agent: the live demo
recorded_job  the recording of a real job that ships with the package
"""
