"""The schedulers' knowledge of owners and of GPUs that they gave away: Slurm, Kubernetes, ECS, Ray.

source       the interface of a scheduler
owners       the labels of each traced process: its environment, completed by the sources
privacy      labels that are dropped or hashed
slurm        jobs of Slurm, from scontrol or slurmrestd
kubernetes   pods of this machine, from the API or the kubelet
owner_chain  from a pod's metadata to its workload, queue and model
pod_resources, unary_call    GPUs of containers, from the kubelet's socket
ecs          the task of a container, from ECS
ray          jobs and actors of Ray, from its dashboard
hints        facts by which a source identifies a process
idle_gpus    GPUs that a job holds without using them
"""
