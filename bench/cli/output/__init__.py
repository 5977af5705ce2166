"""What commands show: plans, progress, tables, and the same as JSON; a command's file here has the command's name."""
