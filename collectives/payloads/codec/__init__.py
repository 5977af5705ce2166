"""How the fields of packed payloads are coded: bits, index sets, codebooks, values."""
