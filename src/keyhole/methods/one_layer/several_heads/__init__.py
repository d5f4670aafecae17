"""Several heads before a net: answers in linear cells of the net are sums of gated rows."""
