"""A second generator of jobs: a discrete-event simulation, independent of stallscope.synth and of the diagnosis.

It imports only the vocabulary of records (stallscope.events). docs/decisions/second-generator.md describes the model
and compares its rows with the recordings.

device     kernels and collectives on the streams of GPUs     machine    host threads that execute programs
program    instructions, and the builder of programs          noise      scatter of hosts, GPUs and fabric
shapes     the job shapes                                     faults     changes to programs, with their truth
records    rows as the agents of the nodes write them         jobs       a shape, a fault and a seed as a trace
"""
