"""Native loops in C: building, finding and calling them. Without them, slower torch and numpy code is used."""
