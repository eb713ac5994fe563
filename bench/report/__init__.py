"""Reports: a page that compares training runs, and the parts of the README that are made from bench/results."""
