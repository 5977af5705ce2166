"""Links: how long messages between hosts are under way, whatever they carry."""
