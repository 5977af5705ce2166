"""Plan the runs of a sweep file, find the runs that are done, and execute each of the other runs once."""
