"""Every private API of torch that this package calls, and nothing else."""
