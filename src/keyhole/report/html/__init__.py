"""Pages: plain data drawn as SVG and put into a template."""
