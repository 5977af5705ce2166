"""Plan the runs of a sweep file, find those that are done, and execute each of the others once."""
