"""GPUs and their driver: NVML state, device numbers, ioctls."""
