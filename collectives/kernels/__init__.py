"""Build, find and call native loops written in C; if there are none, slower torch and numpy code is used."""
