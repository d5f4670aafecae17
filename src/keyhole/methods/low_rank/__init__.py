"""One head whose score matrix has low rank."""
