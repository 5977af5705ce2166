"""When ranks exchange what, one strategy per file."""
