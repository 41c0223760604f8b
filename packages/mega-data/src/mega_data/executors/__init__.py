"""Run the tasks of a stage: on processes of this machine, on a Slurm array or on Ray."""
