"""Extensions bring commands and pictures of their own, by entry point; nothing else of this project imports them."""
