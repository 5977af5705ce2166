"""Jobs: where ranks go, how they are started, watched and stopped, and what is said and kept of a job that fails."""
