"""The schedulers' knowledge of owners and of GPUs that they gave away: Slurm, Kubernetes, ECS, Ray.

source         the interface of a scheduler
schedulers     the sources that the settings choose
owners         the labels of each traced process: its environment, completed by the sources
privacy        labels that are dropped or hashed
hints          facts by which a source identifies a process
slurm          jobs of Slurm, from scontrol or slurmrestd
kubernetes     pods of this machine, from the API or the kubelet
kube_api       read-only requests to the API of Kubernetes, or to a kubelet
owner_lookup   the metadata of the owners of pods, each read once
owner_chain    from a pod's metadata to its workload, queue and model
pod_resources  GPUs of containers, from the kubelet's socket
unary_call     one gRPC call over a unix socket
ecs            the task of a container, from ECS
ray            jobs and actors of Ray, from its dashboard
peers          whether a process belongs to a group of processes that wait for each other
gpu_calls      the last GPU call of each traced process, and its GPUs
proc_activity  the processes of a job, their CPU time and data, from /proc
idle_rows      GPUs that a job holds without using them
"""
