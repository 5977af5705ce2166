"""Pictures of runs: what each kind shows, drawn from rows; matplotlib is imported where a figure is begun."""
