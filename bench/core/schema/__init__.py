"""The schema: the columns of every CSV file, one file per kind of row; each column is declared once."""
