"""Running one function on all ranks, in processes that are started for it or that torchrun, SLURM or MPI started."""
