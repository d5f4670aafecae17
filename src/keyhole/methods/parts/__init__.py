"""One attention head of any parts: score form, link, normaliser, position bias and length law."""
