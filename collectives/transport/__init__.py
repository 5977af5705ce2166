"""Send and receive messages between ranks, count their bytes, and find out which rank was lost."""
