"""Messages between ranks: sending, receiving, counting of bytes, and finding out which rank was lost."""
