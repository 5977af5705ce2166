"""Plan and check what a command should run, start it as a job, and watch the job until it ends."""
