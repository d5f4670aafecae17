"""Labels of tokens of bounded norm."""
