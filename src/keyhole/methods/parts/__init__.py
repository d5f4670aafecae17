"""Attention by parts: naming them, and recovering heads of them."""
