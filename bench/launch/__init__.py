"""Planning a run, starting it as torchrun jobs, and seeing it to its end."""
