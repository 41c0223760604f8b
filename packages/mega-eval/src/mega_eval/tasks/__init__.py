"""The tasks. Each cuts its data into windows, scores them and computes the task's metrics from the scores."""
