"""The columns of every CSV file. Each module declares one kind of file, each column once."""
