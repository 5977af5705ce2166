"""Build, find and call native loops written in C; without them, slower torch and numpy code is used."""
