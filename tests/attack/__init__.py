"""Random attacks on every part, `make attack`: processes are killed, disks fill up, and bad input is sent."""
