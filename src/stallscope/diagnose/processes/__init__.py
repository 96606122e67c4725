"""Single processes: steps without peers, CUDA errors, exits."""
