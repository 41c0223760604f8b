"""Who runs the tasks of a stage: processes of this machine, elements of a Slurm array, or Ray."""
