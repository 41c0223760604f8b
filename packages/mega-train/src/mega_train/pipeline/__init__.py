"""Pipeline parallelism: which layers a stage holds, schedules, and their execution."""
