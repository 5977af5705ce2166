"""What several compressors share, one family per file."""
