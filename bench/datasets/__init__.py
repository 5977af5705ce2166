"""Components, one per file; importing this package imports none of them."""
