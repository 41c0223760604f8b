"""Pipeline parallelism: assignment of layers to stages, schedules, and their execution."""
